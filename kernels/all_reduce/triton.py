"""One-shot all-reduce over NVLink with residual add and RMSNorm in one launch, for a step's few rows.

Every rank writes its part of a row into all others' memory (kernels.peers), waits until theirs are in its
own, and sums: one trip over the link, where a ring or a reduce-scatter takes several. The launch that made
the part may have sent it already (kernels.linear), and another one what adapters add to it (kernels.sgmv):
then the sum begins before those have ended. From each rank N - 1 times the row crosses the link, so large
inputs are NCCL's. A program takes rows in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.peers.triton import (
    PeerBuffers,
    has_empty,
    make_empty,
    most_programs,
    receive,
    send,
    wait_for_one,
)
from kernels.rms_norm.triton import norm_row

MOST_AT_ONCE = 1 << 14
"""Elements that a program waits for together: more do not fit its registers."""


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
    that. delta_peers: delta, if any, is sent to all ranks, apart from y, on all ranks: of sets in turn as
    `peers`' are. Nothing is in the tensor, and the launch that sends it may be on another stream.
    pdl: as of rotary_kv_write. If all is sent, rows are summed as they come, before that launch has ended.
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
    is_apart = delta is not None and delta_peers is not None
    most = most_programs(residual.device, world * block * y.itemsize, leaves_room=is_apart)
    _all_reduce_kernel[(min(num_rows, most),)](
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
        DELTA_APART=is_apart,
        AT_ONCE=max(min(triton.next_power_of_2(world), MOST_AT_ONCE // block), 2),
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
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    EARLY: tl.constexpr = IS_SENT and (DELTA_APART or not HAS_DELTA)
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * width + columns
        # past the L1 cache: EARLY has waited for nothing that would clear it
        values = tl.load(residual_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if HAS_DELTA:
            delta_width = tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
        if EARLY:
            wait_for_one(rows_ptrs[RANK] + (RANK * max_rows + row) * width)
        if not IS_SENT:
            own = tl.load(y_ptr + at, mask=inside, other=0.0)
            if HAS_DELTA and not DELTA_APART:
                own = _add(own, tl.load(delta_ptr + at, mask=columns < delta_width, other=0.0))
            send(own, rows_ptrs, (RANK * max_rows + row) * width + columns, inside, RANK, WORLD)
        total = tl.zeros([BLOCK], tl.float32)
        for first in tl.static_range(0, WORLD, AT_ONCE):
            peer = first + tl.arange(0, AT_ONCE)[:, None]
            comes = (peer < WORLD) & inside[None, :]
            if not IS_SENT:
                comes = comes & (peer != RANK)
            parts_ptr = rows_ptrs[RANK] + (peer * max_rows + row) * width + columns[None, :]
            if DELTA_APART:
                deltas_ptr = delta_ptrs[RANK] + (peer * max_delta_rows + row) * width + columns[None, :]
                delta_comes = (peer < WORLD) & (columns < delta_width)[None, :]
                parts, deltas = _receive_both(parts_ptr, comes, deltas_ptr, delta_comes)
            else:
                parts = receive(parts_ptr, comes)
            if not IS_SENT:
                parts = tl.where(peer == RANK, own[None, :], parts)
            if DELTA_APART:
                parts = _add(parts, deltas)
            # in float32, in order of rank
            for i in tl.static_range(AT_ONCE):
                total += tl.sum(tl.where(peer == first + i, parts.to(tl.float32), 0.0), 0)
        if PDL and EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        values = (values + total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(residual_ptr + at, values.to(dtype), mask=inside)
        tl.store(out_ptr + at, norm_row(values, weight, width, eps, dtype), mask=inside)
    if PDL and EARLY:
        # the launch before has ended by now; who waits for this one must not be ahead of that one
        tl.extra.cuda.gdc_wait()


@triton.jit
def _add(y: tl.tensor, delta: tl.tensor) -> tl.tensor:
    """Rounded to y's dtype."""
    return (y.to(tl.float32) + delta.to(tl.float32)).to(y.dtype)


@triton.jit
def _receive_both(
    parts_ptr: tl.tensor,
    comes: tl.tensor,
    deltas_ptr: tl.tensor,
    delta_comes: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """As `receive`, of two tensors at once: one after the other each would take a trip to the L2."""
    parts = tl.load(parts_ptr, mask=comes, other=0.0, volatile=True)
    deltas = tl.load(deltas_ptr, mask=delta_comes, other=0.0, volatile=True)
    while has_empty(parts) | has_empty(deltas):
        parts = tl.load(parts_ptr, mask=comes, other=0.0, volatile=True)
        deltas = tl.load(deltas_ptr, mask=delta_comes, other=0.0, volatile=True)
    make_empty(parts_ptr, comes)
    make_empty(deltas_ptr, delta_comes)
    return parts, deltas
