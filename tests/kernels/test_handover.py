"""Ranks that hand over what lies between A and B: processes in the interpreter, streams on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from multiprocessing.synchronize import Barrier

import pytest
import torch
import torch.multiprocessing as multiprocessing
from torch.multiprocessing.spawn import start_processes

from kernels.peers.triton import EMPTY
from kernels.sgmv import Segment, Split
from kernels.sgmv.handover import WORD, Handover, num_words
from kernels.sgmv.plan import SgmvPlan, decode_plan
from kernels.sgmv.table import FusedModule
from tests.kernels.peer_memory import Sets, shared_sets
from tests.kernels.test_sgmv import consecutive
from tests.kernels.test_sgmv_split import BY_OUTPUT
from tests.kernels.test_sgmv_split_triton import RANKS, Rank, Turns
from tests.kernels.test_sgmv_triton import DEVICE, LAYER, World, small
from tests.kernels.tiles import Lora

TIMEOUT_S = 60
# rows and ranks that a step leaves behind are not all written by the next one
STEPS = (
    consecutive([2, 1, 2, 1, 3], [-1, 0, 3, 2, 1]),
    consecutive([1, 4], [1, 0]),
    consecutive([3, 5, 1], [3, -1, 2]),
)


def make_sets(whole: World, world: int, plan: SgmvPlan) -> list[Sets]:
    split = Split(0, world, BY_OUTPUT, Turns(world))  # type: ignore[arg-type]
    return shared_sets(world, 1, num_words(plan, whole.modules, split), WORD)


def by_input_part(whole: World, rank: int, world: int) -> World:
    """As if each adapter had only the rows that the rank was dealt: what its part of a sum comes to."""
    part = object.__new__(World)
    part.__dict__ = dict(whole.__dict__)
    rows = slice(rank, None, world)
    part.adapters = [
        {key: Lora(lora.a[rows], lora.b[:, rows], lora.scale) for key, lora in modules.items()}
        for modules in whole.adapters
    ]
    return part


def run_module(
    whole: World, rank: Rank, index: int, segments: Sequence[Segment], seed: int
) -> tuple[torch.Tensor, FusedModule, torch.Tensor]:
    module = whole.modules[index]
    x, _ = whole.inputs(module, segments[-1].end, seed)
    own_x, own = rank.inputs(x, module), rank.modules[index]
    return rank.workspace.beside(own_x, own, LAYER, partial(torch.empty, 0))[1].clone(), module, x


def check(
    whole: World, rank: Rank, number: int, world: int, segments: Sequence[Segment],
    got: torch.Tensor, module: FusedModule, x: torch.Tensor,
) -> None:  # fmt: skip
    adapted = torch.zeros(segments[-1].end, dtype=torch.bool)
    for slot, start, end in segments:
        adapted[start:end] = slot >= 0
    if BY_OUTPUT[module.projection]:
        want = rank.columns(whole.delta(x, segments, module), module)
    else:
        want = by_input_part(whole, number, world).delta(x, segments, module)
    whole.compare(got[adapted], want[adapted])


@pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_processes_give_the_whole_product(world: int) -> None:
    """Ranks that the group's size does not divide, and one that is smaller."""
    whole = World(RANKS, sizes=(48, 24, 96))
    sets = make_sets(whole, world, small(decode_plan(12, max(RANKS))))
    barrier = multiprocessing.get_context("fork").Barrier(world)
    arguments = (whole, sets, barrier)
    start_processes(_run_rank, arguments, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]


def _run_rank(number: int, whole: World, sets: list[Sets], barrier: Barrier) -> None:
    torch.set_num_threads(1)
    world = len(sets)
    rank = Rank(whole, number, Turns(world), small(decode_plan(12, max(RANKS))), sets[number])
    for seed, segments in enumerate(STEPS):
        rank.write(segments)
        for index in range(len(whole.modules)):
            check(whole, rank, number, world, segments, *run_module(whole, rank, index, segments, seed))
            if not BY_OUTPUT[whole.modules[index].projection]:
                barrier.wait(TIMEOUT_S)  # as the sum over the ranks that follows


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(1, 4, 8, 24), (16, 64, 100, 256)])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_streams_give_the_whole_product(world: int, ranks: tuple[int, ...]) -> None:
    """Each rank's expand waits for shrinks that are launched after it."""
    whole = World(ranks, 1536, (1536, 768, 3072), torch.bfloat16)
    plan = decode_plan(16, max(ranks))
    sets = make_sets(whole, world, plan)
    members = [Rank(whole, number, Turns(world), plan, sets[number]) for number in range(world)]
    streams = [torch.cuda.Stream() for _ in members]  # type: ignore[no-untyped-call]
    for member in members:  # who compiles holds up launches that others wait for
        member.write([Segment(-1, 0, 1)])
        for index in range(len(whole.modules)):
            run_module(whole, member, index, [Segment(-1, 0, 1)], 0)
    torch.cuda.synchronize()
    for seed, segments in enumerate(STEPS):
        for member in members:
            member.write(segments)
        for index in range(len(whole.modules)):
            torch.cuda.synchronize()
            results = []
            for member, stream in zip(members, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append(run_module(whole, member, index, segments, seed))
            torch.cuda.synchronize()
            for number, (member, result) in enumerate(zip(members, results, strict=True)):
                check(whole, member, number, world, segments, *result)


def test_before_a_tag_comes_again_all_are_cleared() -> None:
    """While no rank is in a step: a word that nobody has written since could be taken for a new one."""
    sets = shared_sets(2, 1, 8, WORD)
    seen: list[list[bool]] = []

    def wait() -> None:
        seen.append([bool((peers.rows[0].view(torch.uint8) == EMPTY).all()) for peers in sets[0]])

    split = Split(0, 2, BY_OUTPUT, Turns(2))  # type: ignore[arg-type]
    handover = Handover(sets[0], split, (1 << 31) // 4, wait)
    steps = []
    for _ in range(7):
        steps.append(handover.next_step())
        for peers in sets[0]:
            peers.rows[0].fill_(steps[-1])
    assert steps == [1, 2, 3, 1, 2, 3, 1]
    assert seen == [[False, False], [True, True]] * 2
