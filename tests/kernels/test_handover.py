"""Ranks that hand over what lies between A and B: processes in the interpreter, streams on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import start_processes

from kernels.peers.triton import EMPTY, PeerSets
from kernels.sgmv import Segment, Split
from kernels.sgmv.exchange import most_columns
from kernels.sgmv.handover import WORD, Handover, num_words
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan
from tests.kernels.peer_memory import are_empty, shared_sets
from tests.kernels.test_sgmv import consecutive
from tests.kernels.test_sgmv_split import BY_OUTPUT
from tests.kernels.test_sgmv_split_triton import RANKS, Rank, TurnExchange, Turns
from tests.kernels.test_sgmv_triton import DEVICE, LAYER, World, small

TIMEOUT_S = 60
# a step does not write all rows and ranks that the one before has left
STEPS = (
    consecutive([2, 1, 2, 1, 3], [-1, 0, 3, 2, 1]),
    consecutive([1, 4], [1, 0]),
    consecutive([3, 5, 1], [-1, 3, 2]),
)
PLANS = {
    "decode": (decode_plan(12, max(RANKS)), True),
    "decode without room": (decode_plan(12, max(RANKS)), False),
    "prefill": (prefill_plan(12, 8, max(RANKS)), True),
}
"""And whether there is room to hand over what decodes do."""


def make_sets(
    whole: World, world: int, plan: SgmvPlan, has_room: bool = True
) -> list[tuple[PeerSets, PeerSets]]:
    """Of each rank."""
    split = Split(0, world, BY_OUTPUT, TurnExchange(Turns(world), 0))
    most = num_words(plan, whole.modules, split) if has_room else 1
    columns = most_columns(whole.modules, plan.max_rank, split)
    word_sets, plane_sets = shared_sets(world, most, 1, WORD), shared_sets(world, plan.max_tokens, columns)
    return list(zip(word_sets, plane_sets, strict=True))


class Call(NamedTuple):
    """Of one module in one step, on one rank."""

    delta: torch.Tensor
    x: torch.Tensor
    module: int
    segments: Sequence[Segment]

    @classmethod
    def run(cls, whole: World, rank: Rank, index: int, segments: Sequence[Segment], seed: int) -> Call:
        module = whole.modules[index]
        x, _ = whole.inputs(module, segments[-1].end, seed)
        own_x, own = rank.inputs(x, module), rank.modules[index]
        if rank.workspace.plan.kind == "prefill":
            delta = rank.workspace.delta(own_x, own, LAYER, rank.counts)
        else:
            delta = rank.workspace.beside(own_x, own, LAYER, partial(torch.empty, 0))[1].clone()
        return cls(delta, x, index, segments)

    def check(self, whole: World, rank: Rank, number: int, world: int) -> None:
        module = whole.modules[self.module]
        adapted = torch.zeros(len(self.x), dtype=torch.bool)
        for slot, start, end in self.segments:
            adapted[start:end] = slot >= 0
        if BY_OUTPUT[module.projection]:
            want = rank.columns(whole.delta(self.x, self.segments, module), module)
        else:
            want = torch.zeros(len(self.x), sum(module.widths), dtype=torch.float64, device=DEVICE)
            for slot, start, end in self.segments:
                if slot >= 0:
                    lora = whole.adapters[slot][LAYER, module.projection]
                    rows = slice(number, None, world)  # that the rank was dealt
                    a, b = (t.to(DEVICE, whole.dtype).double() for t in (lora.a[rows], lora.b[:, rows]))
                    want[start:end] = lora.scale * (self.x[start:end].double() @ a.T @ b.T)
        whole.compare(self.delta[adapted], want[adapted])


@pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", PLANS)
def test_ranks_in_processes_give_the_whole_product(kind: str, world: int) -> None:
    """Ranks that the group's size does not divide, and one that is smaller."""
    plan, has_room = PLANS[kind]
    whole, plan = World(RANKS, sizes=(48, 24, 96)), small(plan)
    sets = make_sets(whole, world, plan, has_room)
    barrier = multiprocessing.get_context("fork").Barrier(world)
    arguments = (whole, plan, sets, barrier)
    start_processes(_run_rank, arguments, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
    assert are_empty([plane_sets for _, plane_sets in sets])


def _run_rank(
    number: int, whole: World, plan: SgmvPlan, sets: list[tuple[PeerSets, PeerSets]], barrier: Barrier
) -> None:
    torch.set_num_threads(1)
    world = len(sets)
    rank = Rank(whole, number, Turns(world), plan, sets[number])
    for seed, segments in enumerate(STEPS):
        rank.write(segments)
        for index, module in enumerate(whole.modules):
            Call.run(whole, rank, index, segments, seed).check(whole, rank, number, world)
            if not BY_OUTPUT[module.projection]:
                barrier.wait(TIMEOUT_S)  # as the sum over the ranks that follows


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(1, 4, 8, 24), (16, 64, 100, 256)])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_ranks_in_streams_give_the_whole_product(kind: str, world: int, ranks: tuple[int, ...]) -> None:
    """Each rank waits for launches that come after its own."""
    whole = World(ranks, 1536, (1536, 768, 3072), torch.bfloat16)
    plan = decode_plan(16, max(ranks)) if kind == "decode" else prefill_plan(16, 8, max(ranks))
    sets = make_sets(whole, world, plan)
    members = [Rank(whole, number, Turns(world), plan, sets[number]) for number in range(world)]
    compile_all(whole, members)
    streams = [torch.cuda.Stream() for _ in members]  # type: ignore[no-untyped-call]
    for seed, segments in enumerate(STEPS):
        for member in members:
            member.write(segments)
        for index in range(len(whole.modules)):
            torch.cuda.synchronize()
            calls = []
            for member, stream in zip(members, streams, strict=True):
                with torch.cuda.stream(stream):
                    calls.append(Call.run(whole, member, index, segments, seed))
            torch.cuda.synchronize()
            for number, (member, call) in enumerate(zip(members, calls, strict=True)):
                call.check(whole, member, number, world)


def compile_all(whole: World, members: Sequence[Rank]) -> None:
    """As if all others had been here: who compiles holds up launches that others wait for."""
    for number, member in enumerate(members):
        assert member.handover is not None
        planes = [peers.rows[number] for peers in member.handover.plane_sets]
        member.write(STEPS[0] if member.workspace.plan.kind == "prefill" else [Segment(-1, 0, 1)])
        for index in range(len(whole.modules)):
            for rows in planes:
                rows.zero_()
            Call.run(whole, member, index, STEPS[0], 0)
    torch.cuda.synchronize()
    for member in members:
        assert member.handover is not None
        for peers in (*member.handover.plane_sets, *member.handover.sets):
            for rows in peers.rows:
                rows.view(torch.uint8).fill_(EMPTY)


def test_before_a_tag_comes_again_all_are_cleared() -> None:
    """While no rank is in a step: a word that nobody has written since could be taken for a new one."""
    words, planes = (shared_sets(2, 8, 1, dtype) for dtype in (WORD, torch.float32))
    seen: list[list[bool]] = []

    def wait() -> None:
        seen.append([bool((peers.rows[0].view(torch.uint8) == EMPTY).all()) for peers in words[0]])

    split = Split(0, 2, BY_OUTPUT, TurnExchange(Turns(2), 0))
    handover = Handover(words[0], planes[0], split, (1 << 31) // 4, wait)
    steps = []
    for _ in range(7):
        steps.append(handover.next_step())
        for peers in words[0]:
            peers.rows[0].fill_(steps[-1])
    assert steps == [1, 2, 3, 1, 2, 3, 1]
    assert seen == [[False, False], [True, True]] * 2
