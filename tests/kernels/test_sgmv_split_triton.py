"""The Triton kernels over adapters that are dealt out to ranks: together the ranks give the whole product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from engine.shape import NUM_PROJECTIONS
from kernels.peers.triton import PeerSets
from kernels.sgmv import AdapterTable, Segment, Split
from kernels.sgmv.handover import Handover
from kernels.sgmv.lists import ListCounts, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from kernels.sgmv.table import FusedModule
from kernels.sgmv.workspace import SgmvWorkspace
from kernels.silu_mul import silu_mul
from tests.kernels.test_sgmv import consecutive
from tests.kernels.test_sgmv_split import BY_OUTPUT, local, part
from tests.kernels.test_sgmv_triton import DEVICE, LAYER, NUM_LAYERS, World, small
from tests.kernels.tiles import TilePool
from tests.kernels.triton_cases import ULP

OUT = 3
RANKS = (1, 4, 8, 24)
SEGMENTS = consecutive([2, 1, 2, 1, 3], [-1, 0, 3, 2, 1])


class Turns:
    """Ranks that take turns, all twice: first each leaves what it gives, then it gets what all have left."""

    def __init__(self, world: int) -> None:
        self.given: list[torch.Tensor | None] = [None] * world

    def run(self, calls: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        self.given = [None] * len(calls)
        for call in calls:
            call()
        return [call() for call in calls]

    def swap(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """[N, ...]; NaN in the first turn."""
        others = [x.new_full(x.shape, torch.nan) if given is None else given for given in self.given]
        self.given[rank] = x.clone()
        return torch.stack(others)


class TurnExchange:
    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank

    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        return self._turns.swap(self._rank, x)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return self._turns.swap(self._rank, x).sum(0)[self._rank]


class Rank:
    """One rank's part of a World's adapters, in a pool that is NaN everywhere else."""

    def __init__(
        self,
        whole: World,
        rank: int,
        turns: Turns,
        plan: SgmvPlan,
        sets: tuple[PeerSets, PeerSets] | None = None,
    ) -> None:
        """`sets`: of this rank, for a handover in the place of `turns`."""
        self._rank, self._world = rank, len(turns.given)
        shape = (len(whole.adapters), NUM_LAYERS, NUM_PROJECTIONS)
        table = AdapterTable.empty(*shape, whole.max_rank)
        tiles = TilePool(2 * whole.pool.shape[0], whole.pool.shape[1], whole.dtype)
        ranks = whole.table.ranks.cpu()
        for slot, modules in enumerate(whole.adapters):
            parts = {key: local(lora, key[1], rank, self._world) for key, lora in modules.items()}
            packed = tiles.pack(parts, NUM_LAYERS, NUM_PROJECTIONS)
            table.put(slot, packed.tile_offsets, ranks[slot], packed.scales)
        self.modules = [self._module(module) for module in whole.modules]
        on_device = (tensor.to(DEVICE) for tensor in (table.tile_offsets, table.ranks, table.scales))
        split = Split(rank, self._world, BY_OUTPUT, TurnExchange(turns, rank))
        self.handover = None
        if sets is not None:
            self.handover = Handover(sets[0], sets[1], split, NUM_LAYERS * NUM_PROJECTIONS, lambda: None)
        self.workspace = SgmvWorkspace(
            plan,
            self.modules,
            tiles.pool.to(DEVICE),
            AdapterTable(*on_device),
            split=split,
            handover=self.handover,
        )
        self._slot_ranks = ranks.amax((1, 2)).numpy()
        self.counts = ListCounts(0, 0, 0)

    def _module(self, whole: FusedModule) -> FusedModule:
        if BY_OUTPUT[whole.projection]:
            return whole._replace(widths=tuple(width // self._world for width in whole.widths))
        return whole._replace(in_features=whole.in_features // self._world)

    def write(self, segments: Sequence[Segment]) -> ListCounts:
        self.workspace.poison()
        lists = self.workspace.lists.cpu().numpy()
        step = 0 if self.handover is None else self.handover.next_step()
        counts = write_lists(self.workspace.plan, segments, self._slot_ranks, lists, step)
        self.workspace.lists.copy_(torch.from_numpy(lists))
        self.workspace.resolve()
        self.counts = counts
        return counts

    def inputs(self, x: torch.Tensor, module: FusedModule) -> torch.Tensor:
        if BY_OUTPUT[module.projection]:
            return x
        return x[:, part(module.in_features, self._rank, self._world)].contiguous()

    def columns(self, y: torch.Tensor, module: FusedModule) -> torch.Tensor:
        """Of the whole module's output."""
        parts = torch.split(y, list(module.widths), dim=1)
        return torch.cat([p[:, part(p.shape[1], self._rank, self._world)] for p in parts], dim=1)


def check(whole: World, world: int, plan: SgmvPlan, segments: Sequence[Segment] = SEGMENTS) -> None:
    turns = Turns(world)
    ranks = [Rank(whole, rank, turns, plan) for rank in range(world)]
    (counts,) = {rank.write(segments) for rank in ranks}  # the same on all
    adapted = torch.zeros(segments[-1].end, dtype=torch.bool)
    for slot, start, end in segments:
        adapted[start:end] = slot >= 0
    for i, module in enumerate(whole.modules):
        x, y = whole.inputs(module, segments[-1].end)
        want = whole.delta(x, segments, module)

        def call(rank: Rank, i: int = i, x: torch.Tensor = x, module: FusedModule = module) -> torch.Tensor:
            own_x, own = rank.inputs(x, module), rank.modules[i]
            if plan.kind == "prefill":
                return rank.workspace.delta(own_x, own, LAYER, counts)
            return rank.workspace.beside(own_x, own, LAYER, partial(torch.empty, 0))[1].clone()

        deltas = turns.run([partial(call, rank) for rank in ranks])
        if BY_OUTPUT[module.projection]:
            for rank, delta in zip(ranks, deltas, strict=True):
                whole.compare(delta[adapted], rank.columns(want, module)[adapted])
        else:
            whole.compare(torch.stack(deltas).float().sum(0)[adapted], want[adapted])
        if plan.kind == "prefill" and len(module.widths) == 2:
            check_silu_mul(whole, ranks, turns, y, x, counts)


def check_silu_mul(
    whole: World, ranks: list[Rank], turns: Turns, y: torch.Tensor, x: torch.Tensor, counts: ListCounts
) -> None:
    """One pass gives what a delta and silu_mul give."""
    module = whole.modules[2]

    def fused(rank: Rank) -> torch.Tensor:
        own_y = rank.columns(y, module).contiguous()
        return rank.workspace.silu_mul(own_y, x, rank.modules[2], LAYER, counts)

    def in_two(rank: Rank) -> torch.Tensor:
        own_y = rank.columns(y, module).contiguous()
        rank.workspace.add(own_y, x, rank.modules[2], LAYER, counts)
        return silu_mul(own_y)

    got, want = (turns.run([partial(call, rank) for rank in ranks]) for call in (fused, in_two))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=ULP[whole.dtype], rtol=2 * ULP[whole.dtype])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", [decode_plan(12, max(RANKS)), prefill_plan(12, 8, max(RANKS))])
def test_all_projections_and_ranks_in_one_batch(plan: SgmvPlan, world: int) -> None:
    """Ranks that the group's size does not divide, and one that is smaller."""
    check(World(RANKS, sizes=(48, 24, 96)), world, small(plan))


def test_absent_modules_and_modules_that_differ_in_rank() -> None:
    whole = World((24, 3), sizes=(48, 24, 96), projections=((0, 2, OUT), (1, 5, 6)))
    check(whole, 2, small(decode_plan(4, 24)), consecutive([1, 1, 2], [0, -1, 1]))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(1, 4, 8, 24), (16, 64, 100, 256)])
def test_real_tiles(ranks: tuple[int, ...]) -> None:
    whole = World(ranks, 1536, (1536, 768, 3072), torch.bfloat16)
    check(whole, 2, decode_plan(64, max(ranks)), consecutive([3, 1, 40, 1, 7], [-1, 0, 3, 2, 1]))
    check(whole, 3, prefill_plan(512, 8, max(ranks)), consecutive([30, 100, 1, 200, 7], [-1, 0, 3, 2, 1]))
