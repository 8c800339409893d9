"""One split of a decode's context, for the query heads of one KV head. See kernels.paged_attention.triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.block_kernel import accumulate, block_offsets
from kernels.paged_attention.plan_kernel import UNIT_FIELDS


# what changes from step to step must not make a new variant of the kernel
@triton.jit(
    do_not_specialize=["stride_seq"],
    do_not_specialize_on_alignment=["page_table_ptr"],
)
def decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    units_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    scale: tl.tensor,
    stride_seq: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """scale includes log2(e): exponentials are powers of two. Rows past GROUP compute on zeros."""
    kv_head = tl.program_id(0)
    unit = tl.program_id(1)
    seq = tl.load(units_ptr + unit * UNIT_FIELDS)
    row = tl.load(units_ptr + unit * UNIT_FIELDS + 1).to(tl.int64)
    start = tl.load(units_ptr + unit * UNIT_FIELDS + 2)
    end = tl.load(units_ptr + unit * UNIT_FIELDS + 3)
    split = tl.load(units_ptr + unit * UNIT_FIELDS + 4)
    num_splits = tl.load(units_ptr + unit * UNIT_FIELDS + 5)
    if PDL:
        # the plan is older than the launch before; queries, keys and values are not
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if seq < 0:
        return

    head = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    inside = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    at = (row * NUM_HEADS + kv_head * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    pages = page_table_ptr + seq.to(tl.int64) * stride_seq
    best, weight, acc = _attend(
        q, k_ptr, v_ptr, pages, start, end, scale, kv_head.to(tl.int64) * stride_head,
        stride_page, stride_token, HEAD_DIM, PAGE_TOKENS, BLOCK_KEYS,
    )  # fmt: skip

    if num_splits == 1:
        # no context, no weight: zeros
        out = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        stat = unit.to(tl.int64) * NUM_HEADS + kv_head * GROUP + head
        tl.store(partial_max_ptr + stat, best, mask=head < GROUP)
        tl.store(partial_sum_ptr + stat, weight, mask=head < GROUP)
        tl.store(partial_out_ptr + stat[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        # all threads have stored before one of them says so
        tl.debug_barrier()
        arrival = arrivals_ptr + seq * tl.num_programs(0) + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(arrival, 0)
            out_ptr += (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
            first_stat = (unit - split).to(tl.int64) * NUM_HEADS + kv_head * GROUP
            _merge(
                out_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, first_stat, num_splits,
                NUM_HEADS, GROUP, HEAD_DIM, BLOCK_GROUP, BLOCK_DIM, BLOCK_SPLITS,
            )  # fmt: skip


@triton.jit
def _attend(
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    head_offset: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """q [ROWS, D] over keys start .. end: maxima [ROWS], sums of exponentials [ROWS], products [ROWS, D]."""
    BLOCK_ROWS: tl.constexpr = q.shape[0]
    BLOCK_DIM: tl.constexpr = q.shape[1]
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for first in range(start, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        is_key = key < end
        offset = block_offsets(
            pages, key, is_key, head_offset, stride_page, stride_token, PAGE_TOKENS, BLOCK_DIM
        )
        read = is_key[:, None] & (tl.arange(0, BLOCK_DIM) < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offset, mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        v = tl.load(v_ptr + offset, mask=read, other=0.0)
        best, weight, acc = accumulate(scores, scale, v, best, weight, acc)
    return best, weight, acc


@triton.jit
def _merge(
    out_ptr: tl.tensor,
    partial_out_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    first_stat: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    """The parts of a sequence lie NUM_HEADS rows apart from `first_stat` on; [splits, group, dim] a step."""
    head = tl.arange(0, BLOCK_GROUP)
    dim = tl.arange(0, BLOCK_DIM)
    inside = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for first in range(0, num_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        stat = first_stat + split[:, None] * NUM_HEADS + head[None, :]
        read = (split < num_splits)[:, None] & (head < GROUP)[None, :]
        # past the L1 cache, which does not see what other multiprocessors wrote
        maxima = tl.load(partial_max_ptr + stat, mask=read, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(partial_sum_ptr + stat, mask=read, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partial_out_ptr + stat[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=read[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, tl.max(maxima, axis=0))
        # heads beyond GROUP have no maximum
        pivot = tl.where(new_best == float("-inf"), 0.0, new_best)
        factors = tl.exp2(maxima - pivot[None, :])
        shrink = tl.exp2(best - pivot)
        acc = acc * shrink[:, None] + tl.sum(parts * factors[:, :, None], axis=0)
        weight = weight * shrink + tl.sum(sums * factors, axis=0)
        best = new_best
    out = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
