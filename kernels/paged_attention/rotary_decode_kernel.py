"""A decode with its rotary embedding and KV write, in one launch; see `rotary_attention`.

A program is a split of a context for the query heads of one KV head, as in `decode_kernel`; the last split of
a sequence has its new token too. Products have keys, then dimensions for rows and heads for columns, so that
few heads leave little of them empty. A head's lower and upper half of dimensions, which the rotary embedding
pairs, are apart everywhere.

B tokens of a block, D head size, C = D / 2, N query heads of a KV head, filled up to a multiple of 8.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon_names import barrier, gdc_launch_dependents, gdc_wait, tma_load
from kernels.paged_attention import plan_kernel, rotary_attention

HEAD_DIM = gl.constexpr(rotary_attention.HEAD_DIM)
HALF = gl.constexpr(rotary_attention.HEAD_DIM // 2)
BLOCK_KEYS = gl.constexpr(rotary_attention.BLOCK_KEYS)
UNIT_FIELDS = gl.constexpr(plan_kernel.UNIT_FIELDS.value)
NO_MAXIMUM = gl.constexpr(-1e38)
"""Of no keys yet. Finite: a block may be empty, and the difference of two infinities is no number."""
MERGED_AT_ONCE = gl.constexpr(8)


def page_descriptor(kv_rows: torch.Tensor, page_tokens: int) -> TensorDescriptor:
    """Of kv_rows [rows, KH D]: boxes of half a head in a page, which fit into rows of a block."""
    dtype = gl.bfloat16 if kv_rows.dtype == torch.bfloat16 else gl.float16
    box = [page_tokens, HALF.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
    return TensorDescriptor.from_tensor(kv_rows, box, layout)


# what changes from step to step must not make a new variant of the kernel
@gluon.jit(
    do_not_specialize=["stride_seq", "first_row"],
    do_not_specialize_on_alignment=["page_table_ptr", "slots_ptr", "kv_slots_ptr"],
)
def rotary_decode_kernel(
    kv_desc: gl.tensor,
    qkv_ptr: gl.tensor,
    delta_ptr: gl.tensor,
    slots_ptr: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    kv_slots_ptr: gl.tensor,
    kv_ptr: gl.tensor,
    out_ptr: gl.tensor,
    page_table_ptr: gl.tensor,
    units_ptr: gl.tensor,
    partial_out_ptr: gl.tensor,
    partial_max_ptr: gl.tensor,
    partial_sum_ptr: gl.tensor,
    arrivals_ptr: gl.tensor,
    scale: gl.tensor,
    stride_seq: gl.tensor,
    first_row: gl.tensor,
    ROWS_OF_PAGE: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    N: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_DELTA: gl.constexpr,
    PDL: gl.constexpr,
) -> None:
    """kv_desc, kv_ptr: rows of KH D elements; a layer's keys in a page begin at its row `first_row`.

    scale includes log2(e): exponentials are powers of two.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8]
    )
    of_heads: gl.constexpr = gl.SliceLayout(0, mma)
    b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    kv_head = gl.program_id(0)
    unit = gl.program_id(1)
    seq = gl.load(units_ptr + unit * UNIT_FIELDS)
    if seq < 0:
        return
    row = gl.load(units_ptr + unit * UNIT_FIELDS + 1).to(gl.int64)
    start = gl.load(units_ptr + unit * UNIT_FIELDS + 2)
    end = gl.load(units_ptr + unit * UNIT_FIELDS + 3)
    split = gl.load(units_ptr + unit * UNIT_FIELDS + 4)
    num_splits = gl.load(units_ptr + unit * UNIT_FIELDS + 5)
    # a padding row has no context
    has_new = (split == num_splits - 1) & (end > start)
    old = end - start - has_new.to(gl.int32)  # tokens whose keys and values are older than the step
    num_pages = gl.cdiv(old, PAGE_TOKENS)
    pages_ptr = page_table_ptr + seq.to(gl.int64) * stride_seq + start // PAGE_TOKENS
    # lower and upper half of keys, then of values
    block = gl.allocate_shared_memory(kv_desc.dtype, [4, BLOCK_KEYS, HALF], kv_desc.layout)
    has_come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(has_come, count=BLOCK_KEYS // PAGE_TOKENS)
    fence_async_shared()
    column = kv_head * HEAD_DIM
    pages = _page_ids(pages_ptr, 0, num_pages, PAGE_TOKENS)
    _start_block(pages, 0, num_pages, kv_desc, first_row, column, block, has_come, ROWS_OF_PAGE, PAGE_TOKENS)

    q_low, q_high, score, v_low, v_high = _new_token(
        qkv_ptr, delta_ptr, slots_ptr, cos_ptr, sin_ptr, kv_slots_ptr, kv_ptr, row, kv_head, has_new,
        first_row, ROWS_OF_PAGE, NUM_HEADS, NUM_KV_HEADS, PAGE_TOKENS, N, WARPS, HAS_DELTA, PDL,
    )  # fmt: skip
    best = gl.convert_layout(gl.where(has_new, score * scale, NO_MAXIMUM), of_heads)
    weight = gl.full([N], 0.0, gl.float32, of_heads) + has_new.to(gl.float32)
    low = gl.convert_layout(v_low, mma)
    high = gl.convert_layout(v_high, mma)
    q_low = gl.convert_layout(q_low, b)
    q_high = gl.convert_layout(q_high, b)
    best, weight, low, high = _attend(
        q_low, q_high, best, weight, low, high, scale, old, pages_ptr, num_pages, kv_desc, first_row, column,
        block, has_come, ROWS_OF_PAGE, PAGE_TOKENS, WARPS,
    )  # fmt: skip
    _put_split(
        out_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, arrivals_ptr, best, weight, low, high,
        row, seq, kv_head, unit, split, num_splits, NUM_HEADS, NUM_KV_HEADS, N, WARPS,
    )  # fmt: skip


@gluon.jit
def _attend(
    q_low: gl.tensor,
    q_high: gl.tensor,
    best: gl.tensor,
    weight: gl.tensor,
    low: gl.tensor,
    high: gl.tensor,
    scale: gl.tensor,
    old: gl.tensor,
    pages_ptr: gl.tensor,
    num_pages: gl.tensor,
    kv_desc: gl.tensor,
    first_row: gl.tensor,
    column: gl.tensor,
    block: gl.tensor,
    has_come: gl.tensor,
    ROWS_OF_PAGE: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Queries [C, N] over `old` tokens, whose first block is on its way, and what was before: maxima [N],
    sums of exponentials [N], products [C, N], low and high.
    """
    mma: gl.constexpr = low.type.layout
    N: gl.constexpr = low.shape[1]
    a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    for i in range(gl.cdiv(old, BLOCK_KEYS)):
        next_page = (i + 1) * (BLOCK_KEYS // PAGE_TOKENS)
        pages = _page_ids(pages_ptr, next_page, num_pages, PAGE_TOKENS)
        mbarrier.wait(has_come, i & 1)
        scores = mma_v2(block.index(0).load(a), q_low, gl.full([BLOCK_KEYS, N], 0.0, gl.float32, mma))
        scores = mma_v2(block.index(1).load(a), q_high, scores)
        left = old - i * BLOCK_KEYS
        is_key = gl.arange(0, BLOCK_KEYS, gl.SliceLayout(1, mma)) < left
        scores = gl.where(is_key[:, None], scores * scale, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, 0))
        probs = gl.exp2(scores - new_best[None, :])
        shrink = gl.exp2(best - new_best)
        best = new_best
        weight = weight * shrink + gl.sum(probs, 0)
        if left < BLOCK_KEYS:
            _clear_past(block.index(2), left, WARPS)
            _clear_past(block.index(3), left, WARPS)
        probs = gl.convert_layout(probs.to(kv_desc.dtype), b)
        low = mma_v2(block.index(2).permute([1, 0]).load(a), probs, low * shrink[None, :])
        high = mma_v2(block.index(3).permute([1, 0]).load(a), probs, high * shrink[None, :])
        if next_page < num_pages:
            barrier()  # all have read the block
            _start_block(
                pages, next_page, num_pages, kv_desc, first_row, column, block, has_come,
                ROWS_OF_PAGE, PAGE_TOKENS,
            )  # fmt: skip
    return best, weight, low, high


@gluon.jit
def _page_ids(
    pages_ptr: gl.tensor, first: gl.tensor, num_pages: gl.tensor, PAGE_TOKENS: gl.constexpr
) -> tuple[gl.tensor, ...]:
    """Of a block, all on their way at once."""
    pages = ()
    for i in gl.static_range(BLOCK_KEYS // PAGE_TOKENS):
        page = gl.load(pages_ptr + first + i, mask=first + i < num_pages, other=0)
        pages = pages + (page.to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def _start_block(
    pages: gl.tuple,
    first: gl.tensor,
    num_pages: gl.tensor,
    kv_desc: gl.tensor,
    first_row: gl.tensor,
    column: gl.tensor,
    block: gl.tensor,
    has_come: gl.tensor,
    ROWS_OF_PAGE: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
) -> None:
    """Loads a block's pages; those past the last count as come."""
    for i in gl.static_range(BLOCK_KEYS // PAGE_TOKENS):
        is_there = first + i < num_pages
        mbarrier.arrive(has_come, pred=first + i >= num_pages)
        mbarrier.expect(has_come, 4 * PAGE_TOKENS * HALF * 2, pred=is_there)
        row = pages[i] * ROWS_OF_PAGE + first_row
        for part in gl.static_range(4):
            at = [row + part // 2 * PAGE_TOKENS, column + part % 2 * HALF]
            to = block.index(part).slice(i * PAGE_TOKENS, PAGE_TOKENS)
            tma_load(kv_desc, at, has_come, to, pred=is_there)


@gluon.jit
def _clear_past(values: gl.tensor, left: gl.tensor, WARPS: gl.constexpr) -> None:
    """Zeros for tokens [B, C] past the context: what lies there may be no number."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    token = gl.arange(0, BLOCK_KEYS, gl.SliceLayout(1, layout))
    values.store(gl.where((token < left)[:, None], values.load(layout), 0.0))


@gluon.jit
def _new_token(
    qkv_ptr: gl.tensor,
    delta_ptr: gl.tensor,
    slots_ptr: gl.tensor,
    cos_ptr: gl.tensor,
    sin_ptr: gl.tensor,
    kv_slots_ptr: gl.tensor,
    kv_ptr: gl.tensor,
    row: gl.tensor,
    kv_head: gl.tensor,
    has_new: gl.tensor,
    first_row: gl.tensor,
    ROWS_OF_PAGE: gl.constexpr,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    N: gl.constexpr,
    WARPS: gl.constexpr,
    HAS_DELTA: gl.constexpr,
    PDL: gl.constexpr,
) -> tuple[gl.tensor, ...]:
    """Waits for the launch before. Rotated queries [C, N], low and high, and of the new token the scores [N]
    and values [C, N], low and high, zeros where it is another program's. Writes its key and value.
    """
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    dim = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    head = gl.arange(0, N, gl.SliceLayout(0, layout))
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    angle = row * HEAD_DIM + dim
    cos_low = gl.load(cos_ptr + angle)
    cos_high = gl.load(cos_ptr + angle + HALF)
    sin_low = gl.load(sin_ptr + angle)
    sin_high = gl.load(sin_ptr + angle + HALF)
    kv_slot = gl.load(kv_slots_ptr + row).to(gl.int64)
    added = 0
    if HAS_DELTA:
        added = gl.where(gl.load(slots_ptr + row) >= 0, HALF, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    is_head = (dim < HALF)[:, None] & (head < GROUP)[None, :]
    is_new = dim < gl.where(has_new, HALF, 0)
    is_added = dim < added
    in_row = row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    q_at = in_row + (kv_head * GROUP + head)[None, :] * HEAD_DIM + dim[:, None]
    k_at = in_row + (NUM_HEADS + kv_head) * HEAD_DIM + dim
    v_at = k_at + NUM_KV_HEADS * HEAD_DIM
    ql = _values(qkv_ptr, delta_ptr, q_at, is_head, is_added[:, None], HAS_DELTA)
    qh = _values(qkv_ptr, delta_ptr, q_at + HALF, is_head, is_added[:, None], HAS_DELTA)
    kl = _values(qkv_ptr, delta_ptr, k_at, is_new, is_added, HAS_DELTA)
    kh = _values(qkv_ptr, delta_ptr, k_at + HALF, is_new, is_added, HAS_DELTA)
    v_low = _values(qkv_ptr, delta_ptr, v_at, is_new, is_added, HAS_DELTA)
    v_high = _values(qkv_ptr, delta_ptr, v_at + HALF, is_new, is_added, HAS_DELTA)
    q_low = (ql * cos_low[:, None] - qh * sin_low[:, None]).to(dtype)
    q_high = (qh * cos_high[:, None] + ql * sin_high[:, None]).to(dtype)
    k_low = (kl * cos_low - kh * sin_low).to(dtype)
    k_high = (kh * cos_high + kl * sin_high).to(dtype)

    to_row = kv_slot // PAGE_TOKENS * ROWS_OF_PAGE + first_row + kv_slot % PAGE_TOKENS
    to_k = kv_ptr + to_row * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dim
    to_v = to_k + PAGE_TOKENS * NUM_KV_HEADS * HEAD_DIM
    is_written = dim < gl.where(has_new & (kv_slot >= 0), HALF, 0)
    gl.store(to_k, k_low, mask=is_written)
    gl.store(to_k + HALF, k_high, mask=is_written)
    gl.store(to_v, v_low.to(dtype), mask=is_written)
    gl.store(to_v + HALF, v_high.to(dtype), mask=is_written)

    products = q_low.to(gl.float32) * k_low.to(gl.float32)[:, None]
    products += q_high.to(gl.float32) * k_high.to(gl.float32)[:, None]
    zeros = gl.full([HALF, N], 0.0, gl.float32, layout)
    return q_low, q_high, gl.sum(products, 0), zeros + v_low[:, None], zeros + v_high[:, None]


@gluon.jit
def _values(
    qkv_ptr: gl.tensor,
    delta_ptr: gl.tensor,
    at: gl.tensor,
    is_there: gl.tensor,
    is_added: gl.tensor,
    HAS_DELTA: gl.constexpr,
) -> gl.tensor:
    """Of the projection, in float32; with what an adapter adds, rounded to its dtype."""
    values = gl.load(qkv_ptr + at, mask=is_there, other=0.0).to(gl.float32)
    if HAS_DELTA:
        values += gl.load(delta_ptr + at, mask=is_there & is_added, other=0.0).to(gl.float32)
        values = values.to(qkv_ptr.dtype.element_ty).to(gl.float32)
    return values


@gluon.jit
def _put_split(
    out_ptr: gl.tensor,
    partial_out_ptr: gl.tensor,
    partial_max_ptr: gl.tensor,
    partial_sum_ptr: gl.tensor,
    arrivals_ptr: gl.tensor,
    best: gl.tensor,
    weight: gl.tensor,
    low: gl.tensor,
    high: gl.tensor,
    row: gl.tensor,
    seq: gl.tensor,
    kv_head: gl.tensor,
    unit: gl.tensor,
    split: gl.tensor,
    num_splits: gl.tensor,
    NUM_HEADS: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    N: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """What a split found: where it is the whole sequence, its result. The last of several merges them all."""
    GROUP: gl.constexpr = NUM_HEADS // NUM_KV_HEADS
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    head = gl.arange(0, N, gl.SliceLayout(0, layout))
    dim = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    at = head[None, :] * HEAD_DIM + dim[:, None]
    is_head = (dim < HALF)[:, None] & (head < GROUP)[None, :]
    out_ptr += (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if num_splits == 1:
        # no context, no weight: zeros
        inverse = 1.0 / gl.where(weight > 0, weight, 1.0)
        out_low = gl.convert_layout((low * inverse[None, :]).to(dtype), layout)
        out_high = gl.convert_layout((high * inverse[None, :]).to(dtype), layout)
        gl.store(out_ptr + at, out_low, mask=is_head)
        gl.store(out_ptr + at + HALF, out_high, mask=is_head)
    else:
        stat = unit.to(gl.int64) * NUM_HEADS + kv_head * GROUP
        of_heads: gl.constexpr = gl.SliceLayout(0, layout)
        gl.store(partial_max_ptr + stat + head, gl.convert_layout(best, of_heads), mask=head < GROUP)
        gl.store(partial_sum_ptr + stat + head, gl.convert_layout(weight, of_heads), mask=head < GROUP)
        to = partial_out_ptr + stat * HEAD_DIM + at
        gl.store(to, gl.convert_layout(low, layout), mask=is_head)
        gl.store(to + HALF, gl.convert_layout(high, layout), mask=is_head)
        barrier()  # all threads have stored before one of them says so
        arrival = arrivals_ptr + seq * NUM_KV_HEADS + kv_head
        if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            gl.store(arrival, 0)
            first_stat = (unit - split).to(gl.int64) * NUM_HEADS + kv_head * GROUP
            _merge(
                out_ptr, partial_out_ptr, partial_max_ptr, partial_sum_ptr, first_stat, num_splits,
                NUM_HEADS, GROUP, N, WARPS,
            )  # fmt: skip


@gluon.jit
def _merge(
    out_ptr: gl.tensor,
    partial_out_ptr: gl.tensor,
    partial_max_ptr: gl.tensor,
    partial_sum_ptr: gl.tensor,
    first_stat: gl.tensor,
    num_splits: gl.tensor,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    N: gl.constexpr,
    WARPS: gl.constexpr,
) -> None:
    """The parts of a sequence lie NUM_HEADS rows apart from `first_stat` on; [splits, N, D] a step."""
    layout: gl.constexpr = gl.BlockedLayout([MERGED_AT_ONCE, 1, 4], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    of_splits: gl.constexpr = gl.SliceLayout(2, layout)  # [splits, N]
    merged: gl.constexpr = gl.SliceLayout(0, layout)  # [N, D]
    of_heads: gl.constexpr = gl.SliceLayout(1, merged)
    split = gl.arange(0, MERGED_AT_ONCE, gl.SliceLayout(1, of_splits))[:, None]
    head_of_split = gl.arange(0, N, gl.SliceLayout(0, of_splits))[None, :]
    head = gl.arange(0, N, of_heads)
    dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, merged))
    dim_of_split = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, :]
    best = gl.full([N], NO_MAXIMUM, gl.float32, of_heads)
    weight = gl.full([N], 0.0, gl.float32, of_heads)
    acc = gl.full([N, HEAD_DIM], 0.0, gl.float32, merged)
    for first in range(0, num_splits, MERGED_AT_ONCE):
        is_there = (first + split < num_splits) & (head_of_split < GROUP)
        stat = first_stat + (first + split) * NUM_HEADS + head_of_split
        # past the L1 cache, which does not see what other multiprocessors wrote
        maxima = gl.load(partial_max_ptr + stat, mask=is_there, other=NO_MAXIMUM, cache_modifier=".cg")
        sums = gl.load(partial_sum_ptr + stat, mask=is_there, other=0.0, cache_modifier=".cg")
        parts_ptr = partial_out_ptr + gl.expand_dims(stat, 2) * HEAD_DIM + gl.expand_dims(dim_of_split, 1)
        parts = gl.load(parts_ptr, mask=gl.expand_dims(is_there, 2), other=0.0, cache_modifier=".cg")
        new_best = gl.maximum(best, gl.convert_layout(gl.max(maxima, 0), of_heads))
        pivot = gl.convert_layout(new_best, gl.SliceLayout(0, of_splits))
        factors = gl.exp2(maxima - pivot[None, :])
        shrink = gl.exp2(best - new_best)
        acc = acc * shrink[:, None] + gl.sum(parts * gl.expand_dims(factors, 2), 0)
        weight = weight * shrink + gl.convert_layout(gl.sum(sums * factors, 0), of_heads)
        best = new_best
    out = acc / gl.where(weight > 0, weight, 1.0)[:, None]
    at = head[:, None] * HEAD_DIM + dim[None, :]
    gl.store(
        out_ptr + at,
        out.to(out_ptr.dtype.element_ty),
        mask=(head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :],
    )
