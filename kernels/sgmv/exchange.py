"""What lies between A and B of fully sharded adapters, exchanged by one launch: `kernels.sgmv.split.exchange`
for steps with prefill, on GPUs that share memory.

Every rank sends what the others need of its planes' sum, and waits for what they send (kernels.peers); NCCL
takes a collective for that and two launches around it. In decode the expand waits by itself
(kernels.sgmv.handover). In prefill it reads sums again for each tile of columns, so it is left one plane.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.peers.triton import PeerBuffers, most_programs, not_empty, receive, send
from kernels.sgmv.split import Split
from kernels.sgmv.table import FusedModule

_NUM_WARPS = 4
_ELEMS = 1024  # of a program's tile, at least: `receive` wants one a thread or more


def most_columns(modules: Iterable[FusedModule], max_rank: int, split: Split) -> int:
    """Of what a rank sends to one."""
    each = split.most_rows(max_rank)
    return max(each * (len(m.widths) if split.by_output[m.projection] else 1) for m in modules)


def exchange_planes(planes: torch.Tensor, peers: PeerBuffers, by_output: bool) -> torch.Tensor:
    """planes [splits, T, columns] fp32 -> [1, T, columns x N] by output, [1, T, columns / N] by input, new.

    As `kernels.sgmv.split.exchange` on all ranks of `peers`, which must have room for T rows; the same T on
    all, sets in turn. Never ends if another rank does not call it.
    """
    num_splits, num_tokens, columns = planes.shape
    world = len(peers.rows)
    sent = columns if by_output else columns // world
    assert planes.stride(2) == 1
    assert num_tokens <= peers.max_rows
    assert sent <= peers.rows[0].shape[2]
    out = planes.new_empty(1, num_tokens, columns * world if by_output else sent)
    block = triton.next_power_of_2(sent)
    rows = max(1, _ELEMS // block)
    most = most_programs(planes.device, world * rows * block * planes.itemsize)
    _exchange_kernel[(min(triton.cdiv(num_tokens, rows), most),)](
        planes,
        out,
        peers.rows,
        peers.max_rows,
        peers.rows[0].shape[2],
        num_tokens,
        planes.stride(0),
        planes.stride(1),
        SENT=sent,
        SPLITS=num_splits,
        RANK=peers.rank,
        WORLD=world,
        BY_OUTPUT=by_output,
        ROWS=rows,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
    return out


@triton.jit(do_not_specialize=["max_rows", "width", "num_tokens", "plane_stride", "row_stride"])
def _exchange_kernel(
    planes_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    plane_stride: tl.tensor,
    row_stride: tl.tensor,
    SENT: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(0) * ROWS, num_tokens, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < num_tokens) & (column < SENT)
        mine = (RANK * max_rows + row) * width + column
        if BY_OUTPUT:
            own = _sum_planes(planes_ptr + row * row_stride + column, inside, plane_stride, SPLITS)
            send(own, rows_ptrs, mine, inside, RANK, WORLD)
            for peer in tl.static_range(WORLD):
                part = own
                if peer != RANK:
                    part = receive(rows_ptrs[RANK] + (peer * max_rows + row) * width + column, inside)
                tl.store(out_ptr + (row * SENT + column) * WORLD + peer, part, mask=inside)
        else:
            for peer in tl.static_range(WORLD):
                if peer != RANK:  # the rows that it was dealt
                    theirs_ptrs = planes_ptr + row * row_stride + column * WORLD + peer
                    theirs = _sum_planes(theirs_ptrs, inside, plane_stride, SPLITS)
                    tl.store(rows_ptrs[peer] + mine, not_empty(theirs), mask=inside)
            own_ptrs = planes_ptr + row * row_stride + column * WORLD + RANK
            own = _sum_planes(own_ptrs, inside, plane_stride, SPLITS)
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for peer in tl.static_range(WORLD):
                part = own
                if peer != RANK:
                    part = receive(rows_ptrs[RANK] + (peer * max_rows + row) * width + column, inside)
                total += part
            tl.store(out_ptr + row * SENT + column, total, mask=inside)


@triton.jit
def _sum_planes(
    ptrs: tl.tensor,
    inside: tl.tensor,
    plane_stride: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    total = tl.load(ptrs, mask=inside, other=0.0)
    for p in tl.static_range(1, SPLITS):
        total += tl.load(ptrs + p * plane_stride, mask=inside, other=0.0)
    return total
