"""One-shot all-reduce over NVLink with residual add and RMSNorm in one launch, for a step's few rows.

Every rank writes its part of a row into all others' memory (kernels.peers), waits until theirs are in its
own, and sums: one trip over the link, where a ring or a reduce-scatter takes several. The launch that made
the part may have sent it already (kernels.linear); without a delta the sum then begins before that one has
ended. From each rank N - 1 times the row crosses the link, so large inputs are NCCL's. A program takes rows
in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.peers.triton import PeerBuffers, most_programs, receive, send, wait_for_one
from kernels.rms_norm.triton import norm_row


def all_reduce_add_rms_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: PeerBuffers,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    pdl: bool = False,
    is_sent: bool = False,
    delta_peers: PeerBuffers | None = None,
) -> torch.Tensor:
    """The contract of kernels.all_reduce.reference for this rank; residual in place, returns `out`, new.

    residual, y and delta [T, H] contiguous, T at most peers.max_rows and the same on all ranks; delta and
    slots: both or neither. All ranks must call it as often and in the same order, sets in turn. Never ends if
    another rank does not call it.
    is_sent: y was, to all ranks, by the launch before this one: nothing is in the tensor. Ranks may differ in
    that. delta_peers: delta, if any, was sent to the others, apart from y, on all ranks: of sets in turn as
    `peers`' are.
    pdl: as of rotary_kv_write. Rows that were sent, and have no delta, are summed as they come, before that
    launch has ended.
    """
    assert (delta is None) == (slots is None)
    assert not is_sent or delta is None or delta_peers is not None
    for tensor in (y, delta):
        assert tensor is None or (tensor.shape == residual.shape and tensor.is_contiguous())
    assert residual.is_contiguous()
    num_rows, width = residual.shape
    assert num_rows <= peers.max_rows
    assert delta_peers is None or num_rows <= delta_peers.max_rows
    out = torch.empty_like(residual)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    world = len(peers.rows)
    _all_reduce_kernel[(min(num_rows, most_programs(residual.device, world * block * y.itemsize)),)](
        residual,
        y,
        delta,
        slots,
        weight,
        out,
        peers.rows,
        peers.max_rows,
        peers.rows if delta_peers is None else delta_peers.rows,
        0 if delta_peers is None else delta_peers.max_rows,
        num_rows,
        width,
        eps,
        RANK=peers.rank,
        WORLD=world,
        HAS_DELTA=delta is not None,
        IS_SENT=is_sent,
        DELTA_APART=delta is not None and delta_peers is not None,
        PDL=pdl,
        launch_pdl=pdl,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),  # 8 elements a thread: one load of 16 bytes in bf16
    )
    return out


@triton.jit(
    do_not_specialize=["max_rows", "max_delta_rows", "num_rows"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def _all_reduce_kernel(
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    delta_ptrs: tl.tuple,
    max_delta_rows: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_SENT: tl.constexpr,
    DELTA_APART: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    EARLY: tl.constexpr = IS_SENT and not HAS_DELTA
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * width + columns
        if HAS_DELTA:
            has_delta = columns < tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
            delta = tl.load(delta_ptr + at, mask=has_delta, other=0.0)
        if EARLY:
            wait_for_one(rows_ptrs[RANK] + (RANK * max_rows + row) * width)
        if IS_SENT:
            y = receive(rows_ptrs[RANK] + (RANK * max_rows + row) * width + columns, inside)
        else:
            y = tl.load(y_ptr + at, mask=inside, other=0.0)
        own = _add(y, delta) if HAS_DELTA else y
        if not IS_SENT:
            part = y if DELTA_APART else own
            send(part, rows_ptrs, (RANK * max_rows + row) * width + columns, inside, RANK, WORLD)
        # summed in float32, in order of rank
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(WORLD):
            if peer == RANK:
                total += own.to(tl.float32)
            else:
                theirs = receive(rows_ptrs[RANK] + (peer * max_rows + row) * width + columns, inside)
                if DELTA_APART:
                    sent = delta_ptrs[RANK] + (peer * max_delta_rows + row) * width + columns
                    theirs = _add(theirs, receive(sent, has_delta))
                total += theirs.to(tl.float32)
        if PDL and EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        # past the L1 cache: EARLY has waited for nothing that would clear it
        values = tl.load(residual_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        values = (values + total.to(own.dtype).to(tl.float32)).to(own.dtype).to(tl.float32)
        tl.store(residual_ptr + at, values.to(own.dtype), mask=inside)
        tl.store(out_ptr + at, norm_row(values, weight, width, eps, own.dtype), mask=inside)
    if PDL and EARLY:
        # the launch before has ended by now; who waits for this one must not be ahead of that one
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add(y: tl.tensor, delta: tl.tensor) -> tl.tensor:
    """Rounded to y's dtype."""
    return (y.to(tl.float32) + delta.to(tl.float32)).to(y.dtype)
