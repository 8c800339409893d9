"""Columns of all ranks side by side in one launch over NVLink, for a step's few rows of logits.

Every rank writes its part into all others' memory (kernels.peers), and each puts its own and what came where
they belong. The launch that computed the part may have sent it already (kernels.linear).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.peers.triton import PeerBuffers, most_programs, receive, send

_BLOCK = 4096


def gather_columns(own: torch.Tensor, peers: PeerBuffers, is_sent: bool = False) -> torch.Tensor:
    """The contract of kernels.gather_columns.reference for this rank's part, [T, W] contiguous.

    T at most peers.max_rows, T and W the same on all ranks. All ranks must call it as often and in the same
    order, sets in turn. Never ends if another rank does not call it. is_sent: as of all_reduce_add_rms_norm.
    """
    num_rows, width = own.shape
    assert own.is_contiguous()
    assert num_rows <= peers.max_rows
    assert width == peers.rows[0].shape[-1]
    world = len(peers.rows)
    out = own.new_empty(num_rows, world * width)
    num_units = num_rows * triton.cdiv(width, _BLOCK)
    if num_units == 0:
        return out
    _gather_columns_kernel[(min(num_units, most_programs(own.device, _BLOCK * own.itemsize)),)](
        own,
        out,
        peers.rows,
        peers.max_rows,
        num_rows,
        width,
        RANK=peers.rank,
        WORLD=world,
        IS_SENT=is_sent,
        BLOCK=_BLOCK,
        num_warps=max(_BLOCK // 256, 1),  # 8 elements a thread: one load of 16 bytes in bf16
    )
    return out


@triton.jit(do_not_specialize=["max_rows", "num_rows"])
def _gather_columns_kernel(
    own_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    IS_SENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A unit is a block of one row. All are sent before the first is waited for."""
    blocks = tl.cdiv(width, BLOCK)
    num_units = num_rows * blocks
    if not IS_SENT:
        for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
            row = (unit // blocks).to(tl.int64)
            column = unit % blocks * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            own = tl.load(own_ptr + row * width + column, mask=inside, other=0.0)
            send(own, rows_ptrs, (RANK * max_rows + row) * width + column, inside, RANK, WORLD)
            tl.store(out_ptr + (row * WORLD + RANK) * width + column, own, mask=inside)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        row = (unit // blocks).to(tl.int64)
        column = unit % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        for peer in tl.static_range(WORLD):
            if IS_SENT or peer != RANK:
                part = receive(rows_ptrs[RANK] + (peer * max_rows + row) * width + column, inside)
                tl.store(out_ptr + (row * WORLD + peer) * width + column, part, mask=inside)
