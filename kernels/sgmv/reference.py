"""Segmented LoRA branch (Punica's SGMV, Chen et al., 2023, arXiv:2310.18547) over paged adapter tiles.

y[t] += scale[s] * ((x[t] @ A[s].T) @ B[s].T)    with s = the slot of t's segment
x [T, in] contiguous   y [T, out] in place; each ColumnSlice of y takes the delta of one projection
A[s] [rank, in] and B[s].T [rank, out] are read from pool tiles of at most RANK_BLOCK rows
slot -1 and modules of rank 0 leave y unchanged, bit for bit; y is never zeroed here
fp32, fp16 or bf16 in and out, fp32 accumulation; ranks differ freely and are not padded
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.sgmv.table import RANK_BLOCK, AdapterTable, ColumnSlice, Segment


def sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    pool: torch.Tensor,
    table: AdapterTable,
    layer: int,
    slices: Sequence[ColumnSlice],
) -> None:
    elements = pool.view(-1)
    for slot, start, end in segments:
        if slot < 0:
            continue
        x_segment = x[start:end].float()
        for projection, first, last in slices:
            delta = torch.zeros(end - start, last - first, device=y.device)
            for a, b in _tiles(elements, table, slot, layer, projection, x.shape[1], last - first):
                delta += (x_segment @ a.float().T) @ b.float()
            if table.ranks[slot, layer, projection] > 0:
                y_slice = y[start:end, first:last]
                y_slice.copy_(y_slice.float() + table.scales[slot, layer, projection] * delta)


def _tiles(
    elements: torch.Tensor,
    table: AdapterTable,
    slot: int,
    layer: int,
    projection: int,
    in_features: int,
    out_features: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(A tile [rb, in], B tile [rb, out]) of each rank block."""
    rank = int(table.ranks[slot, layer, projection])
    offsets = table.tile_offsets[slot, layer, projection].tolist()
    tiles = []
    for block, row in enumerate(range(0, rank, RANK_BLOCK)):
        rows = min(RANK_BLOCK, rank - row)
        a_offset, b_offset = offsets[0][block], offsets[1][block]
        tiles.append(
            (
                elements[a_offset : a_offset + rows * in_features].view(rows, in_features),
                elements[b_offset : b_offset + rows * out_features].view(rows, out_features),
            )
        )
    return tiles
