"""The op of a group with fully sharded adapters: its ranks, as threads, together give the whole product."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.shape import NUM_PROJECTIONS
from kernels.sgmv import ColumnSlice, Segment, Split, SplitViews, split_sgmv
from tests.kernels.test_sgmv import (
    DOWN,
    GATE_UP,
    NUM_LAYERS,
    QKV,
    TOLERANCE,
    WIDTHS,
    adapter,
    expected,
    make_world,
)
from tests.kernels.tiles import Lora, Modules, Packed, TilePool

BY_OUTPUT = (True, True, True, False, True, True, False)
SEGMENTS = (Segment(-1, 0, 2), Segment(1, 2, 3), Segment(0, 3, 10), Segment(2, 10, 12))
TOKENS = 12


class Threads:
    """One exchange for all ranks; each takes its own by `of`."""

    def __init__(self, world: int) -> None:
        self.num_calls = 0
        self._barrier = threading.Barrier(world)
        self._given: list[torch.Tensor] = [torch.empty(0)] * world

    def of(self, rank: int) -> ThreadExchange:
        return ThreadExchange(self, rank)

    def swap(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x
        self._barrier.wait(timeout=10)
        given = list(self._given)
        self._barrier.wait(timeout=10)
        self.num_calls += rank == 0
        return given


class ThreadExchange:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._threads.swap(self._rank, x))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._threads.swap(self._rank, x)).sum(0)[self._rank]


def part(width: int, rank: int, world: int) -> slice:
    return slice(rank * width // world, (rank + 1) * width // world)


def local(lora: Lora, projection: int, rank: int, world: int) -> Lora:
    """A rank's part of A and B."""
    rows = slice(rank, None, world)
    if BY_OUTPUT[projection]:
        return Lora(lora.a[rows], lora.b[part(len(lora.b), rank, world)], lora.scale)
    return Lora(lora.a[:, part(lora.a.shape[1], rank, world)], lora.b[:, rows], lora.scale)


def views(
    adapters: Sequence[Modules], rank: int, threads: Threads, world: int, dtype: torch.dtype
) -> SplitViews:
    tiles = TilePool(num_pages=400, page_elems=16 * 80, dtype=dtype)
    widths = [
        (i, o // world) if by_output else (i // world, o)
        for (i, o), by_output in zip(WIDTHS, BY_OUTPUT, strict=True)
    ]
    split = SplitViews(tiles.pool, widths, Split(rank, world, BY_OUTPUT, threads.of(rank)))
    for slot, modules in enumerate(adapters):
        parts = {key: local(lora, key[1], rank, world) for key, lora in modules.items()}
        packed = tiles.pack(parts, NUM_LAYERS, NUM_PROJECTIONS)
        ranks = torch.zeros_like(packed.ranks)
        for key, lora in modules.items():
            ranks[key] = lora.a.shape[0]
        split.put(slot, *Packed(packed.tile_offsets, ranks, packed.scales))
    return split


def on_all_ranks(world: int, call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(call, range(world)))


ADAPTERS = [adapter(17, seed=1), adapter(3, seed=2, projections=(0, 4, DOWN)), adapter(40, seed=3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slices", [QKV, GATE_UP])
def test_by_output_each_rank_gets_its_columns(slices: Sequence[ColumnSlice], dtype: torch.dtype) -> None:
    world = 4
    threads = Threads(world)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTHS[slices[0].projection][0], generator=generator).to(dtype)
    y = torch.randn(TOKENS, slices[-1].end, generator=generator).to(dtype)

    def columns(s: ColumnSlice, rank: int) -> slice:
        inside = part(s.end - s.start, rank, world)
        return slice(s.start + inside.start, s.start + inside.stop)

    def call(rank: int) -> torch.Tensor:
        own = torch.cat([y[:, columns(s, rank)] for s in slices], dim=1)
        widths = [columns(s, rank).stop - columns(s, rank).start for s in slices]
        own_slices = [
            ColumnSlice(s.projection, sum(widths[:i]), sum(widths[: i + 1])) for i, s in enumerate(slices)
        ]
        split_sgmv(own, x, SEGMENTS, views(ADAPTERS, rank, threads, world, dtype), 1, own_slices)
        return own

    want = expected(y, x, SEGMENTS, make_world(ADAPTERS, dtype), 1, slices)
    for rank, got in enumerate(on_all_ranks(world, call)):
        wanted = torch.cat([want[:, columns(s, rank)] for s in slices], dim=1)
        torch.testing.assert_close(got.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert threads.num_calls == 1


@pytest.mark.parametrize("projection", [3, DOWN])
@pytest.mark.parametrize("world", [2, 4])
def test_by_input_the_sum_of_all_ranks_holds_the_delta(projection: int, world: int) -> None:
    threads = Threads(world)
    in_features, out_features = WIDTHS[projection]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, in_features, generator=generator)
    slices = (ColumnSlice(projection, 0, out_features),)

    def call(rank: int) -> torch.Tensor:
        own = torch.zeros(TOKENS, out_features)
        split = views(ADAPTERS, rank, threads, world, torch.float32)
        split_sgmv(own, x[:, part(in_features, rank, world)], SEGMENTS, split, 0, slices)
        return own

    want = expected(torch.zeros(TOKENS, out_features), x, SEGMENTS, make_world(ADAPTERS), 0, slices)
    torch.testing.assert_close(
        torch.stack(on_all_ranks(world, call)).sum(0).double(), want, atol=1e-5, rtol=1e-5
    )
    assert threads.num_calls == 1


def test_nothing_is_exchanged_for_projections_that_no_segment_adapts() -> None:
    threads = Threads(2)
    x, y = torch.ones(3, WIDTHS[3][0] // 2), torch.ones(3, 48)
    split = views(ADAPTERS, 0, threads, 2, torch.float32)
    for segment in (Segment(-1, 0, 3), Segment(1, 0, 3)):
        split_sgmv(y, x, (segment,), split, 0, (ColumnSlice(3, 0, 48),))
    assert threads.num_calls == 0
    assert torch.equal(y, torch.ones(3, 48))
    split.clear(1)
    with pytest.raises(KeyError):
        split.layer(1, 0)
