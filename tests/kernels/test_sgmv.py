"""The CPU op and the reference against plain matrix products, for ranks and segments of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from engine.shape import NUM_PROJECTIONS
from engine.shape import RANK_BLOCK as PACKED_RANK_BLOCK
from kernels.sgmv import (
    RANK_BLOCK,
    AdapterTable,
    AdapterViews,
    ColumnSlice,
    Segment,
    absolute_offsets,
    sgmv,
)
from kernels.sgmv.reference import sgmv as sgmv_reference
from tests.kernels.tiles import Modules, Packed, TilePool, put_everywhere, random_lora

RANKS = (1, 4, 8, 15, 16, 17, 24, 64, 100)
Q, K, V, OUT, GATE, UP, DOWN = range(NUM_PROJECTIONS)
WIDTHS = ((48, 64), (48, 32), (48, 32), (64, 48), (48, 80), (48, 80), (80, 48))
QKV = (ColumnSlice(Q, 0, 64), ColumnSlice(K, 64, 96), ColumnSlice(V, 96, 128))
GATE_UP = (ColumnSlice(GATE, 0, 80), ColumnSlice(UP, 80, 160))
NUM_LAYERS = 2
# one rounding to the dtype after fp32 sums
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class World(NamedTuple):
    pool: torch.Tensor
    table: AdapterTable
    views: AdapterViews
    adapters: list[Modules]  # by slot


def make_world(adapters: list[Modules], dtype: torch.dtype = torch.float32) -> World:
    tiles = TilePool(num_pages=400, page_elems=3 * RANK_BLOCK * 80, dtype=dtype)
    table = AdapterTable.empty(len(adapters), NUM_LAYERS, NUM_PROJECTIONS, max(RANKS))
    views = AdapterViews(tiles.pool, WIDTHS)
    for slot, modules in enumerate(adapters):
        put_everywhere(slot, tiles.pack(modules, NUM_LAYERS, NUM_PROJECTIONS), table, views)
    return World(tiles.pool, table, views, adapters)


def adapter(rank: int, seed: int, projections: Sequence[int] = range(NUM_PROJECTIONS)) -> Modules:
    generator = torch.Generator().manual_seed(seed)
    return {
        (layer, p): random_lora(rank, *WIDTHS[p], generator)
        for layer in range(NUM_LAYERS)
        for p in projections
    }


def expected(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    world: World,
    layer: int,
    slices: Sequence[ColumnSlice],
) -> torch.Tensor:
    """Token by token, in double precision, with the weights rounded as the pool holds them."""
    out = y.double()
    for slot, start, end in segments:
        for projection, first, last in slices:
            lora = world.adapters[slot].get((layer, projection)) if slot >= 0 else None
            if lora is not None:
                a, b = (part.to(y.dtype).double() for part in (lora.a, lora.b))
                for t in range(start, end):
                    out[t, first:last] += lora.scale * (b @ (a @ x[t].double()))
    return out


def check(
    world: World,
    segments: Sequence[Segment],
    layer: int = 1,
    slices: Sequence[ColumnSlice] = QKV,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Both ops equal the plain products; returns the CPU op's y."""
    generator = torch.Generator().manual_seed(7)
    num_tokens = segments[-1].end
    x = torch.randn(num_tokens, WIDTHS[slices[0].projection][0], generator=generator).to(dtype)
    y = torch.randn(num_tokens, slices[-1].end, generator=generator).to(dtype)
    want = expected(y, x, segments, world, layer, slices)
    from_cpu, from_reference = y.clone(), y.clone()
    sgmv(from_cpu, x, segments, world.views, layer, slices)
    sgmv_reference(from_reference, x, segments, world.pool, world.table, layer, slices)
    for got in (from_cpu, from_reference):
        torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    return from_cpu


def consecutive(lengths: Sequence[int], slots: Sequence[int]) -> list[Segment]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [Segment(slot, end - length, end) for slot, length, end in zip(slots, lengths, ends, strict=True)]


def test_rank_block_is_the_packers() -> None:
    assert RANK_BLOCK == PACKED_RANK_BLOCK


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slices", [QKV, GATE_UP, (ColumnSlice(OUT, 0, 48),), (ColumnSlice(DOWN, 0, 48),)])
def test_all_ranks_in_one_batch(slices: tuple[ColumnSlice, ...], dtype: torch.dtype) -> None:
    world = make_world([adapter(rank, seed) for seed, rank in enumerate(RANKS)], dtype)
    lengths = [3, 1, 2, 7, 1, 1, 5, 1, 4, 2]
    check(world, consecutive(lengths, [-1, *range(len(RANKS))]), slices=slices, dtype=dtype)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 133])
def test_one_adapter(rank: int, num_tokens: int) -> None:
    check(make_world([adapter(rank, 3)]), [Segment(0, 0, num_tokens)])


@pytest.mark.parametrize("projections", [(Q,), (Q, V), (DOWN,), (K,), ()])
@pytest.mark.parametrize("slices", [QKV, GATE_UP, (ColumnSlice(DOWN, 0, 48),)])
def test_absent_modules_contribute_nothing(
    projections: tuple[int, ...], slices: tuple[ColumnSlice, ...]
) -> None:
    """FR-42: a q-only or down-only adapter leaves the other columns as they were, bit for bit."""
    world = make_world([adapter(8, 1), adapter(8, 2, projections)])
    segments = consecutive([2, 3, 4], [-1, 0, 1])
    got = check(world, segments, slices=slices)
    generator = torch.Generator().manual_seed(7)
    torch.randn(9, WIDTHS[slices[0].projection][0], generator=generator)
    y = torch.randn(9, slices[-1].end, generator=generator)
    assert torch.equal(got[:2], y[:2])
    for projection, first, last in slices:
        if projection not in projections:
            assert torch.equal(got[5:, first:last], y[5:, first:last])


def test_a_module_in_one_layer_only() -> None:
    generator = torch.Generator().manual_seed(0)
    world = make_world([{(1, Q): random_lora(4, *WIDTHS[Q], generator)}])
    check(world, [Segment(0, 0, 3)], layer=0)
    check(world, [Segment(0, 0, 3)], layer=1)


def test_modules_of_one_adapter_may_differ_in_rank_and_scale() -> None:
    """rank_pattern and alpha_pattern."""
    generator = torch.Generator().manual_seed(0)
    ranks = {Q: 64, K: 3, V: 17}
    world = make_world([{(1, p): random_lora(r, *WIDTHS[p], generator) for p, r in ranks.items()}])
    check(world, [Segment(0, 0, 5)])


def test_a_reused_slot_keeps_nothing_of_its_former_adapter() -> None:
    """FR-25: large then small adapter in one slot; former pages are poisoned."""
    tiles = TilePool(num_pages=60, page_elems=3 * RANK_BLOCK * 80, dtype=torch.float32)
    table = AdapterTable.empty(1, NUM_LAYERS, NUM_PROJECTIONS, max(RANKS))
    views = AdapterViews(tiles.pool, WIDTHS)
    put_everywhere(0, tiles.pack(adapter(64, 1), NUM_LAYERS, NUM_PROJECTIONS), table, views)
    tiles.pool.fill_(torch.nan)
    small = adapter(8, 2, (Q, V))
    put_everywhere(0, tiles.pack(small, NUM_LAYERS, NUM_PROJECTIONS), table, views)
    check(World(tiles.pool, table, views, [small]), [Segment(0, 0, 5)])


def test_a_cleared_slot_is_empty() -> None:
    world = make_world([adapter(8, 1)])
    world.table.clear(0)
    world.views.clear(0)
    assert (world.table.tile_offsets == -1).all()
    assert (world.table.ranks == 0).all()
    with pytest.raises(KeyError):
        world.views.layer(0, 0)


def test_contiguous_rank_blocks_become_one_product() -> None:
    lora = random_lora(64, 48, 64, torch.Generator().manual_seed(0))
    elements = torch.cat((lora.a.flatten(), lora.b.T.flatten()))
    starts = torch.arange(4) * RANK_BLOCK
    packed = Packed(
        torch.stack((starts * 48, 64 * 48 + starts * 64)).view(1, 1, 2, 4),
        torch.tensor([[64]]),
        torch.tensor([[lora.scale]]),
    )
    views = AdapterViews(elements, [(48, 64)])
    views.put(0, *packed)
    module = views.layer(0, 0)[0]
    assert module is not None
    assert len(module.runs) == 1
    x, y = torch.randn(3, 48), torch.zeros(3, 64)
    sgmv(y, x, [Segment(0, 0, 3)], views, 0, [ColumnSlice(0, 0, 64)])
    torch.testing.assert_close(y, lora.scale * (x @ lora.a.T @ lora.b.T))


def test_absolute_offsets_follow_the_page_ids() -> None:
    image = torch.tensor([[0, 5, -1], [10, 19, 20]])
    got = absolute_offsets(image, page_ids=[7, 3, 9], page_elems=10)
    assert got.tolist() == [[70, 75, -1], [30, 39, 90]]
