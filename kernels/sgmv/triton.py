"""Segmented LoRA branch on the GPU (Punica's SGMV, Chen et al., 2023, arXiv:2310.18547), contract as in
`kernels.sgmv.reference`: y[t] += scale[s] * ((x[t] @ A[s].T) @ B[s].T), s the slot of t's segment.

    resolve   once a step: `kernels.sgmv.lists` + AdapterTable -> where each unit's tiles lie, for all layers
    shrink    x [T, in] -> planes [splits, T, slices x rank] fp32, partial sums over parts of K
    expand    planes -> out [T, columns]: the planes' sum times B and the scale; stored, or added to y

In a group that deals out adapters' rows, kernels.sgmv.split.exchange comes between the two, or they hand over
the sums by themselves (kernels.sgmv.handover).

Resolving first keeps a unit's chain of dependent loads at two: its tile's place, then the tile. What units
there are stands in device memory, so that one captured graph serves any batch of its bucket. No atomics:
every sum has one order. fp32, fp16 or bf16 in and out, fp32 accumulation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from kernels.peers.triton import PeerBuffers, SendArguments
from kernels.sgmv import decode_kernel, prefill_kernel
from kernels.sgmv.handover import HandoverArguments
from kernels.sgmv.lists import blocks_start
from kernels.sgmv.plan import SgmvPlan
from kernels.sgmv.split import Split
from kernels.sgmv.table import AdapterTable, FusedModule
from kernels.sgmv.tiles_kernel import resolve_kernel


def resolve(
    plan: SgmvPlan,
    lists: torch.Tensor,
    table: AdapterTable,
    a_tiles: torch.Tensor,
    b_tiles: torch.Tensor,
    split: Split | None,
) -> None:
    """Fill a_tiles [layers x projections, max_items + 1, plan.shrink.rank_blocks] and
    b_tiles [layers x projections, max_blocks + 1, plan.rank_blocks], both int64, up to the lists' ends.
    """
    _, num_layers, num_projections = table.ranks.shape
    assert plan.rank_blocks <= table.tile_offsets.shape[-1]
    num_tiles = max(plan.max_items * plan.shrink.rank_blocks, plan.max_blocks * plan.rank_blocks)
    block = min(256, triton.next_power_of_2(num_tiles))
    resolve_kernel[(num_layers * num_projections, min(4, triton.cdiv(num_tiles, block)), 2)](
        lists,
        table.tile_offsets,
        table.ranks,
        a_tiles,
        b_tiles,
        ITEMS=plan.max_items + 1,
        BLOCKS=plan.max_blocks + 1,
        ITEM_RANK_BLOCKS=plan.shrink.rank_blocks,
        RANK_BLOCKS=plan.rank_blocks,
        TABLE_BLOCKS=table.tile_offsets.shape[-1],
        PROJECTIONS=num_projections,
        BY_OUTPUT=0 if split is None else sum(bit << p for p, bit in enumerate(split.by_output)),
        SHARD=0 if split is None else split.rank,
        WORLD=1 if split is None else split.world,
        BLOCK=block,
        num_warps=max(1, block // 64),
    )


def shrink(
    planes: torch.Tensor,
    x: torch.Tensor,
    pool: torch.Tensor,
    lists: torch.Tensor,
    a_tiles: torch.Tensor,
    plan: SgmvPlan,
    module: FusedModule,
    layer_module: int,
    align: int,
    num_ctas: int,
    pdl: bool = False,
    handover: HandoverArguments | None = None,
) -> None:
    """x [T, in] contiguous -> planes [splits, T or more, slices x most rows of A] fp32, contiguous.

    Only rows and ranks that the lists name are written. `layer_module` is the first projection's row in
    a_tiles; `align` divides every tile's offset and width. `num_ctas`: any number in decode, one a unit in
    prefill. `pdl`: the next launch on the stream is an expand with `pdl`, which may start before this ends.
    `handover`: in decode; the ranks' memory gets the sums instead, and of planes only the shape counts.
    """
    tile, slices = plan.shrink, len(module.widths)
    assert x.is_contiguous()
    assert x.shape[1] == module.in_features
    assert planes.is_contiguous()
    assert planes.shape[0] == tile.num_splits(module.in_features)
    decode = plan.kind == "decode"
    kernel = decode_kernel.shrink_kernel if decode else prefill_kernel.shrink_kernel
    prefill = {"RANK_BLOCKS": tile.rank_blocks, "GROUP": tile.group(slices)}
    own: dict[str, Any] = prefill
    if decode:
        own = {"WARPS": tile.num_warps, "PDL": pdl}
        own |= _keywords(handover or HandoverArguments.none(planes))
    kernel[(num_ctas,)](
        x,
        pool,
        lists,
        a_tiles,
        planes,
        layer_module,
        plan.max_items + 1,
        planes.shape[1],
        K=module.in_features,
        SLICES=slices,
        PLANE_RANK=planes.shape[2] // slices,
        SPLITS=planes.shape[0],
        CHUNKS=tile.num_chunks(module.in_features),
        BLOCK_K=tile.block_k,
        ROWS=tile.rows,
        ALIGN=align,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **own,
    )


def expand(
    out: torch.Tensor,
    planes: torch.Tensor,
    pool: torch.Tensor,
    lists: torch.Tensor,
    b_tiles: torch.Tensor,
    scales: torch.Tensor,
    plan: SgmvPlan,
    module: FusedModule,
    layer_module: int,
    align: int,
    num_ctas: int,
    add: bool,
    pdl: bool = False,
    peers: PeerBuffers | None = None,
    handover: HandoverArguments | None = None,
) -> None:
    """planes [any, T or more, slices x most rows of B] -> out [T, columns], both contiguous.

    `add`: out += delta, columns of absent modules untouched; otherwise out = delta with zeros there. Rows
    without an adapter are never touched.

    `pdl`: in decode, behind a shrink with `pdl`, for which it waits.
    `peers`: in decode, as wide as `out`; each of them, this rank too, gets what else would be in `out`.
    `handover`: in decode, as of the shrink; of planes nothing is read then, but their shape.
    In prefill the sum of the planes passes through x's dtype, in two parts: in fp16 it must stay below 65504.
    """
    tile = plan.expand
    widths = (*module.widths, 0, 0)
    assert out.is_contiguous()
    assert out.shape[1] == sum(widths)
    assert len(module.widths) <= 3
    assert planes.is_contiguous()
    decode = plan.kind == "decode"
    kernel = decode_kernel.expand_kernel if decode else prefill_kernel.expand_kernel
    own: dict[str, Any] = {"TILES": tile.tiles}
    if decode:
        rows, max_rows, rank, world = SendArguments.of(peers, out)
        own = {"sent_ptrs": rows, "max_sent_rows": max_rows, "RANK": rank, "WORLD": world}
        own |= {"PDL": pdl, "launch_pdl": pdl}
        own |= _keywords(handover or HandoverArguments.none(planes))
    else:
        assert peers is None
    kernel[(num_ctas,)](
        out,
        pool,
        lists,
        b_tiles,
        scales,
        planes,
        layer_module,
        scales.shape[1] * scales.shape[2],
        blocks_start(plan),
        plan.max_blocks + 1,
        planes.shape[1],
        N0=widths[0],
        N1=widths[1],
        N2=widths[2],
        PLANE_RANK=planes.shape[2] // len(module.widths),
        SPLITS=planes.shape[0],
        RANK_BLOCKS=plan.rank_blocks,
        ROWS=tile.rows,
        BLOCK_N=tile.columns,
        ADD=add,
        ALIGN=align,
        num_warps=tile.num_warps,
        **own,
    )


def _keywords(handover: HandoverArguments) -> dict[str, Any]:
    """Of both kernels in decode."""
    return {
        "words_ptrs": handover.words,
        "part": handover.part,
        "calls": handover.num_calls,
        "HOW": handover.how,
        "GROUP_RANK": handover.rank,
        "GROUP_SIZE": handover.world,
    }


def expand_silu_mul(
    act: torch.Tensor,
    y: torch.Tensor,
    planes: torch.Tensor,
    pool: torch.Tensor,
    lists: torch.Tensor,
    b_tiles: torch.Tensor,
    scales: torch.Tensor,
    plan: SgmvPlan,
    module: FusedModule,
    layer_module: int,
    align: int,
    num_ctas: int,
) -> None:
    """act [T, width] = silu(gate) * up of (gate | up) = y + delta, contiguous, in prefill. y is not changed.

    Only rows that the lists name are written. Rounding as if y had got its delta first.
    """
    tile, width = plan.gated, module.widths[0]
    assert plan.kind == "prefill"
    assert module.widths == (width, width)
    for tensor in (y, act, planes):
        assert tensor.is_contiguous()
    assert y.shape == (len(act), 2 * width)
    prefill_kernel.expand_silu_mul_kernel[(num_ctas,)](
        act,
        y,
        pool,
        lists,
        b_tiles,
        scales,
        planes,
        layer_module,
        scales.shape[1] * scales.shape[2],
        blocks_start(plan),
        plan.max_blocks + 1,
        planes.shape[1],
        WIDTH=width,
        PLANE_RANK=planes.shape[2] // 2,
        SPLITS=planes.shape[0],
        RANK_BLOCKS=plan.rank_blocks,
        ROWS=plan.expand.rows,
        BLOCK_N=tile.columns,
        TILES=tile.tiles,
        ALIGN=align,
        num_warps=tile.num_warps,
    )
