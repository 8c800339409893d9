from __future__ import annotations

import itertools
import random
import time

import pytest

from engine.adapters.layout import Ranks, make_layout, num_elements, pages_needed
from engine.shape import NUM_PROJECTIONS, RANK_BLOCK, ModelShape
from tests.engine.adapters.adapter_dirs import BASE_T, LLAMA_8B, PAGE_ELEMS

MI = 1 << 20
MIXED = (1, 4, 8, 15, 16, 17, 24, 32, 64, 100, 256)


def all_linear(shape: ModelShape, rank: int) -> Ranks:
    return {(layer, p): rank for layer in range(shape.num_layers) for p in range(NUM_PROJECTIONS)}


def random_ranks(shape: ModelShape, seed: int) -> Ranks:
    rng = random.Random(seed)
    ranks = {key: rng.choice(MIXED) for key in all_linear(shape, 1) if rng.random() < rng.choice((0.2, 0.9))}
    return ranks or {(0, 0): 1}


def assert_valid(shape: ModelShape, ranks: Ranks, page_elems: int) -> None:
    """Tiles cover every rank row once, in the block they belong to; none overlap or straddle a page."""
    layout = make_layout(shape, ranks, page_elems)
    end = 0
    for tile in sorted(layout.tiles, key=lambda tile: tile.offset):
        assert tile.offset >= end
        end = tile.offset + tile.rows * tile.width
        assert tile.offset // page_elems == (end - 1) // page_elems
    assert layout.num_pages == -(-end // page_elems)
    rows = [
        (t.layer, t.projection, t.side, t.block * RANK_BLOCK + row)
        for t in layout.tiles
        for row in range(t.rows)
    ]
    assert sorted(rows) == sorted(
        (layer, p, side, row) for (layer, p), rank in ranks.items() for side in (0, 1) for row in range(rank)
    )
    assert all(t.width == shape.widths(t.projection)[t.side] for t in layout.tiles)


@pytest.mark.parametrize("seed", range(40))
def test_tiles_cover_an_adapter_and_never_overlap_or_straddle_a_page(seed: int) -> None:
    assert_valid(BASE_T, random_ranks(BASE_T, seed), PAGE_ELEMS + seed * 16)


@pytest.mark.parametrize("seed", range(3))
def test_tiles_of_a_large_model_are_placed_validly(seed: int) -> None:
    assert_valid(LLAMA_8B, random_ranks(LLAMA_8B, seed), MI)


@pytest.mark.parametrize("rank", [16, 32, 64, 128, 256])
def test_an_8b_all_linear_adapter_fills_its_pages_exactly(rank: int) -> None:
    """40 pages of 2 MiB in bf16 for rank 16."""
    assert LLAMA_8B.page_elems(16) == MI
    assert pages_needed(LLAMA_8B, all_linear(LLAMA_8B, rank), MI) == 40 * rank // 16


@pytest.mark.parametrize("seed", range(20))
def test_pages_of_mixed_ranks_are_within_one_of_the_published_sum(seed: int) -> None:
    """FR-37: a rank-8 module takes memory for rank 8, also beside one of rank 256."""
    ranks = random_ranks(LLAMA_8B, seed)
    elements = sum(rank * sum(LLAMA_8B.widths(p)) for (_, p), rank in ranks.items())
    assert num_elements(LLAMA_8B, ranks) == elements
    assert elements / MI <= pages_needed(LLAMA_8B, ranks, MI) < elements / MI + 1


def test_gaps_take_at_most_two_pages_whatever_the_projections() -> None:
    """FR-37."""
    for size in range(1, NUM_PROJECTIONS + 1):
        for projections in itertools.combinations(range(NUM_PROJECTIONS), size):
            ranks = {(layer, p): 32 for layer in range(32) for p in projections}
            gaps = pages_needed(LLAMA_8B, ranks, MI) - num_elements(LLAMA_8B, ranks) / MI
            assert 0 <= gaps <= 2


@pytest.mark.parametrize("seed", range(40))
def test_pages_that_barely_hold_a_tile_are_at_least_half_full(seed: int) -> None:
    """FR-37."""
    ranks = random_ranks(BASE_T, seed)
    page_elems = PAGE_ELEMS + seed * 32
    full = num_elements(BASE_T, ranks) / page_elems
    assert full <= pages_needed(BASE_T, ranks, page_elems) <= 2 * full + 1


def test_a_part_of_an_adapter_takes_the_pages_of_that_part() -> None:
    ranks = {(layer, 0): 8 for layer in range(LLAMA_8B.num_layers)}
    assert pages_needed(LLAMA_8B, ranks, MI) == 2


def test_rank_blocks_of_a_module_follow_each_other_where_they_fit_one_page() -> None:
    """A kernel may then read them as one run."""
    layout = make_layout(BASE_T, {(0, 0): 48}, page_elems=1 << 14)
    offsets = {(t.side, t.block): t.offset for t in layout.tiles}
    assert [offsets[0, b] - offsets[0, 0] for b in range(3)] == [0, 1024, 2048]
    assert [offsets[1, b] - offsets[1, 0] for b in range(3)] == [0, 1024, 2048]


def test_layers_come_in_order() -> None:
    """The first layers can be used while the last are on their way."""
    layout = make_layout(LLAMA_8B, all_linear(LLAMA_8B, 64), MI)
    last_page = [max(t.offset for t in layout.tiles if t.layer == layer) // MI for layer in range(32)]
    assert last_page == sorted(last_page)
    assert last_page[0] <= 160 // 32


def test_the_largest_adapter_is_placed_quickly() -> None:
    """It runs under the GIL, beside the step loop."""
    started = time.perf_counter()
    make_layout(LLAMA_8B, all_linear(LLAMA_8B, 256), MI)
    assert time.perf_counter() - started < 1.0
