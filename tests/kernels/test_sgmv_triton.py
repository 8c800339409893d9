"""The Triton kernels against plain products: interpreted on a CPU, compiled where there is a GPU.

Interpreted kernels know no bf16 products and take seconds where a GPU takes microseconds, so the default tier
has small tiles and few tokens; `-m gpu` has the real ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.shape import NUM_PROJECTIONS
from kernels.sgmv import AdapterTable, ColumnSlice, Segment
from kernels.sgmv.lists import ListCounts, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from kernels.sgmv.table import FusedModule
from kernels.sgmv.workspace import SgmvWorkspace
from kernels.silu_mul import silu_mul
from tests.kernels.peer_memory import are_empty, shared_sets
from tests.kernels.test_sgmv import consecutive
from tests.kernels.tiles import Modules, TilePool, random_lora
from tests.kernels.triton_cases import ULP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS = (1, 4, 8, 15, 16, 17, 24, 40)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Q, K, V, OUT, GATE, UP, DOWN = range(NUM_PROJECTIONS)
NUM_LAYERS = 2
LAYER = 1


class World:
    """Adapters in a pool that is NaN everywhere else, and the fused modules of one layer."""

    def __init__(
        self,
        ranks: Sequence[int],
        hidden: int = 48,
        sizes: tuple[int, int, int] = (64, 32, 80),
        dtype: torch.dtype = torch.float32,
        projections: Sequence[Sequence[int]] = (),
    ) -> None:
        """sizes: columns of q; of k and v; of gate and up. projections: by adapter, if not all."""
        q, kv, inter = sizes
        widths = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
        widths += [(hidden, inter), (hidden, inter), (inter, hidden)]
        self.widths, self.dtype, self.max_rank = widths, dtype, max(ranks)
        self.modules = [
            FusedModule.of(hidden, self.slices(Q, K, V)),
            FusedModule.of(q, self.slices(OUT)),
            FusedModule.of(hidden, self.slices(GATE, UP)),
            FusedModule.of(inter, self.slices(DOWN)),
        ]
        generator = torch.Generator().manual_seed(0)
        owned = projections or [range(NUM_PROJECTIONS)] * len(ranks)
        self.adapters: list[Modules] = [
            {(LAYER, p): random_lora(rank, *widths[p], generator) for p in own}
            for rank, own in zip(ranks, owned, strict=True)
        ]
        self.pack()

    def slices(self, *projections: int) -> list[ColumnSlice]:
        ends = list(itertools.accumulate(self.widths[p][1] for p in projections))
        return [
            ColumnSlice(p, end - self.widths[p][1], end) for p, end in zip(projections, ends, strict=True)
        ]

    def pack(self) -> None:
        elems = sum(lora.a.numel() + lora.b.numel() for own in self.adapters for lora in own.values())
        page_elems = 16 * max(max(pair) for pair in self.widths)
        tiles = TilePool(2 + 2 * elems // page_elems, page_elems, self.dtype)
        table = AdapterTable.empty(len(self.adapters), NUM_LAYERS, NUM_PROJECTIONS, self.max_rank)
        for slot, own in enumerate(self.adapters):
            table.put(slot, *tiles.pack(own, NUM_LAYERS, NUM_PROJECTIONS))
        self.pool = tiles.pool.to(DEVICE)
        self.table = AdapterTable(*(t.to(DEVICE) for t in (table.tile_offsets, table.ranks, table.scales)))

    def workspace(self, plan: SgmvPlan) -> SgmvWorkspace:
        return SgmvWorkspace(plan, self.modules, self.pool, self.table)

    def write(self, workspace: SgmvWorkspace, segments: Sequence[Segment]) -> ListCounts:
        """What the runner does before a step. What the last step left is not cleared, but poisoned."""
        workspace.poison()
        lists = workspace.lists.cpu().numpy()
        counts = write_lists(workspace.plan, segments, self.table.ranks.amax((1, 2)).cpu().numpy(), lists)
        workspace.lists.copy_(torch.from_numpy(lists))
        workspace.resolve()
        return counts

    def inputs(
        self, module: FusedModule, num_tokens: int, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_tokens, module.in_features, generator=generator)
        y = torch.randn(num_tokens, sum(module.widths), generator=generator)
        return x.to(DEVICE, self.dtype), y.to(DEVICE, self.dtype)

    def delta(self, x: torch.Tensor, segments: Sequence[Segment], module: FusedModule) -> torch.Tensor:
        """In double precision, with the weights rounded as the pool holds them."""
        delta = torch.zeros(x.shape[0], sum(module.widths), dtype=torch.float64, device=x.device)
        for slot, start, end in segments:
            column = 0
            for projection, width in enumerate(module.widths, module.projection):
                lora = self.adapters[slot].get((LAYER, projection)) if slot >= 0 else None
                if lora is not None:
                    a, b = (part.to(x.device, self.dtype).double() for part in (lora.a, lora.b))
                    delta[start:end, column : column + width] = lora.scale * (
                        x[start:end].double() @ a.T @ b.T
                    )
                column += width
        return delta

    def check(
        self, workspace: SgmvWorkspace, segments: Sequence[Segment], modules: Sequence[int] = range(4)
    ) -> None:
        """In place; and beside a GEMM, if the plan is for decode."""
        counts = self.write(workspace, segments)
        adapted = torch.zeros(segments[-1].end, dtype=torch.bool)
        for slot, start, end in segments:
            adapted[start:end] = slot >= 0
        for module in [self.modules[i] for i in modules]:
            x, y = self.inputs(module, segments[-1].end)
            want, got = self.delta(x, segments, module), y.clone()
            workspace.add(got, x, module, LAYER, counts)
            self.compare(got, y.double() + want)
            assert torch.equal(got[want == 0], y[want == 0])  # bit for bit
            if workspace.plan.kind == "prefill":
                self.compare(workspace.delta(x, module, LAYER, counts), want)
                if module is self.modules[2]:
                    self.check_silu_mul(workspace, x, y, got, counts)
            if workspace.plan.kind == "decode":
                _, delta = workspace.beside(x, module, LAYER, partial(y.clone))
                self.compare(delta[adapted], want[adapted])

    def check_silu_mul(
        self,
        workspace: SgmvWorkspace,
        x: torch.Tensor,
        y: torch.Tensor,
        with_lora: torch.Tensor,
        counts: ListCounts,
    ) -> None:
        """One pass gives what `add` and silu_mul give."""
        before = y.clone()
        act = workspace.silu_mul(y, x, self.modules[2], LAYER, counts)
        assert torch.equal(y, before)
        torch.testing.assert_close(act, silu_mul(with_lora), atol=ULP[self.dtype], rtol=2 * ULP[self.dtype])

    def compare(self, got: torch.Tensor, want: torch.Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def small(plan: SgmvPlan) -> SgmvPlan:
    """Tiles so small that a few tokens of a tiny model fill several."""
    rows = 4  # as the decode kernel must have it
    shrink = replace(plan.shrink, rows=rows, block_k=64, min_chunks=1, max_splits=2, num_warps=4)
    return replace(plan, shrink=shrink, expand=replace(plan.expand, rows=rows, columns=32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("plan", [decode_plan(20, max(RANKS)), prefill_plan(20, 12, max(RANKS))])
def test_all_ranks_in_one_batch(plan: SgmvPlan, dtype: torch.dtype) -> None:
    world = World(RANKS, dtype=dtype)
    segments = consecutive([2, 1, 2, 5, 1, 1, 4, 1, 1], [-1, *range(len(RANKS))])
    world.check(world.workspace(small(plan)), segments, modules=(0, 2))


@pytest.mark.parametrize("hidden", [20, 33])
def test_widths_that_no_tile_divides(hidden: int) -> None:
    """33: no vector load divides it either."""
    world = World((8, 17), hidden, sizes=(hidden + 1, 7, 45))
    world.check(world.workspace(small(decode_plan(4, world.max_rank))), consecutive([1, 1, 2], [-1, 0, 1]))


def test_absent_modules_leave_the_output_as_it_was() -> None:
    """FR-42: adapters of only some projections, one of them with none in a fused module."""
    world = World((8, 20, 8), projections=((Q, DOWN), (V, UP), (K,)))
    segments = consecutive([1, 2, 1, 3], [-1, 0, 1, 2])
    world.check(world.workspace(small(decode_plan(8, world.max_rank))), segments)


def test_modules_of_one_adapter_may_differ_in_rank() -> None:
    """rank_pattern: the lists know only the largest."""
    world = World((40,))
    generator = torch.Generator().manual_seed(1)
    for p, rank in {Q: 3, K: 17, OUT: 16, UP: 1}.items():
        world.adapters[0] = {**world.adapters[0], (LAYER, p): random_lora(rank, *world.widths[p], generator)}
    world.pack()
    world.check(world.workspace(small(decode_plan(3, 40))), [Segment(0, 0, 3)])


def test_a_layer_without_adapter() -> None:
    world = World((8,))
    workspace = world.workspace(small(decode_plan(2, 8)))
    counts = world.write(workspace, [Segment(0, 0, 2)])
    module = world.modules[0]
    x, y = world.inputs(module, 2)
    got = y.clone()
    workspace.add(got, x, module, 1 - LAYER, counts)
    assert torch.equal(got, y)


def test_smaller_steps_follow_larger_ones() -> None:
    """FR-39: stale entries, other adapters and no adapter at all, under one plan and one set of buffers."""
    world = World((8, 40, 16))
    workspace = world.workspace(small(decode_plan(6, world.max_rank)))
    for lengths, slots in [
        ([1, 3, 2], [0, 1, 2]),
        ([2, 1], [-1, 2]),
        ([1], [1]),
        ([2], [-1]),
        ([4, 1], [0, 1]),
    ]:
        world.check(workspace, consecutive(lengths, slots))


def test_a_larger_table_than_the_plan_needs() -> None:
    """A workspace for small ranks reads the rows of a table made for large ones."""
    world = World((40, 8))
    world.check(world.workspace(small(decode_plan(2, 8))), [Segment(1, 0, 2)])


def test_peers_get_the_delta_of_rows_that_have_an_adapter() -> None:
    world = World((8, 40))
    workspace = world.workspace(small(decode_plan(12, world.max_rank)))
    segments = consecutive([1, 2, 1, 6], [-1, 0, -1, 1])
    has_adapter = torch.tensor([slot >= 0 for slot, start, end in segments for _ in range(start, end)])
    world.write(workspace, segments)
    for module in world.modules[1::2]:  # o and down
        x, y = world.inputs(module, len(has_adapter))
        sets = shared_sets(3, 11, y.shape[1])
        _, delta = workspace.beside(x, module, LAYER, partial(y.clone))
        want = delta[has_adapter].clone()
        world.write(workspace, segments)
        workspace.beside(x, module, LAYER, partial(y.clone), peers=sets[1][0])
        for peer in range(3):
            sent = sets[1][0].rows[peer][1, : len(x)]
            assert torch.equal(sent[has_adapter], want)
            sent[has_adapter] = sets[0][0].rows[0][0, 0, 0]  # as who reads it
        assert are_empty(sets)


GPU_RANKS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 64, 100, 128, 255, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rank"),
    [(torch.bfloat16, rank) for rank in GPU_RANKS] + [(torch.float16, 17), (torch.float16, 64)],
)
def test_every_rank(dtype: torch.dtype, rank: int) -> None:
    world = World((rank, 8), hidden=256, sizes=(512, 128, 768), dtype=dtype)
    for plan in (decode_plan(64, rank), prefill_plan(256, 8, rank)):
        workspace = world.workspace(plan)
        for num_tokens in (1, 2, 3, 7, 53):
            world.check(workspace, consecutive([2, num_tokens, 1], [-1, 0, 1]), modules=(0, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_single_precision(num_tokens: int) -> None:
    world = World((3, 20), hidden=256, sizes=(512, 128, 768))
    world.check(world.workspace(decode_plan(64, 20)), consecutive([2, num_tokens, 1], [-1, 0, 1]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "sizes"),
    [
        pytest.param(576, (576, 192, 1536), id="SmolLM2-135M"),
        pytest.param(4096, (4096, 1024, 14336), id="Llama-3-8B"),
        pytest.param(200, (136, 8, 1000), id="multiples of 8"),
        pytest.param(333, (77, 5, 1001), id="odd"),
    ],
)
def test_widths(hidden: int, sizes: tuple[int, int, int]) -> None:
    world = World((8, 16, 33), hidden, sizes, torch.bfloat16)
    world.check(world.workspace(decode_plan(1, 33)), [Segment(2, 0, 1)], modules=(0, 3))
    world.check(world.workspace(decode_plan(64, 33)), consecutive([2, 1, 40, 1], [-1, 0, 1, 2]))
    world.check(world.workspace(prefill_plan(1024, 8, 33)), consecutive([5, 200, 1, 300], [-1, 0, 1, 2]))


@pytest.mark.gpu
def test_every_order_equals_the_solo_run() -> None:
    """FR-40: A(r8), base, B(r64), C(r16, down only) in any order; solo runs differ by the path they take."""
    world = World(
        (8, 64, 16), 256, (512, 128, 768), torch.bfloat16, projections=(range(7), range(7), (DOWN,))
    )
    workspace = world.workspace(decode_plan(64, 64))
    for slots in itertools.permutations([0, -1, 1, 2]):
        world.check(workspace, consecutive([3, 2, 1, 9], slots))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_a_captured_graph_serves_any_later_mix(num_tokens: int) -> None:
    """FR-39: captured with no adapter, replayed with others; bit for bit what an eager run gives."""
    world = World(RANKS, 512, (512, 128, 1536), torch.bfloat16)
    workspace = world.workspace(decode_plan(num_tokens, world.max_rank))
    inputs = [world.inputs(module, num_tokens) for module in world.modules]
    outputs = [torch.empty_like(y) for _, y in inputs]

    def step() -> None:
        workspace.resolve()
        for module, (x, y), out in zip(world.modules, inputs, outputs, strict=True):
            _, delta = workspace.beside(x, module, LAYER, partial(y.clone))
            torch.add(y, delta, out=out)

    world.write(workspace, [Segment(-1, 0, num_tokens)])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    mixes: list[list[Segment]] = [[Segment(slot, 0, num_tokens)] for slot in (0, 7)]
    if num_tokens > 1:
        mixes.append(consecutive([1] * num_tokens, [i % len(RANKS) for i in range(num_tokens)]))
        mixes.append(consecutive([1, 2, num_tokens - 3], [3, 7, 5]))
    for segments in mixes:
        world.write(workspace, segments)
        graph.replay()
        replayed = [out.clone() for out in outputs]
        world.write(workspace, segments)
        step()
        for module, (x, y), out, eager in zip(world.modules, inputs, replayed, outputs, strict=True):
            assert torch.equal(out, eager)
            world.compare(out, y.double() + world.delta(x, segments, module))


@pytest.mark.gpu
def test_long_segments_are_deterministic() -> None:
    world = World((16, 64), 1024, (1024, 256, 2048), torch.bfloat16)
    workspace = world.workspace(prefill_plan(4096, 8, 64))
    segments = consecutive([1500, 2000], [0, 1])
    counts = world.write(workspace, segments)
    module = world.modules[0]
    x, y = world.inputs(module, 3500)
    runs = []
    for _ in range(3):
        got = y.clone()
        workspace.add(got, x, module, LAYER, counts)
        runs.append(got)
    world.compare(runs[0], y.double() + world.delta(x, segments, module))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
