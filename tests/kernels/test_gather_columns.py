"""Columns of all ranks side by side: ranks are processes in the interpreter, streams on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from kernels.gather_columns.reference import gather_columns as reference
from kernels.gather_columns.triton import gather_columns
from kernels.peers.triton import NUM_SETS, PeerBuffers, PeerSets
from tests.kernels.peer_memory import (
    are_empty,
    can_compute,
    compute_and_send,
    run_alone,
    run_in_streams,
    shared_sets,
)
from tests.kernels.triton_cases import DEVICE

MAX_ROWS = 8
MOST_PROGRAMS = 3  # so that some take several units
BLOCK = 32
NUM_CALLS = 7  # each set several times, by different numbers of rows


class Call(NamedTuple):
    parts: list[torch.Tensor]  # of each rank
    senders: tuple[int, ...]  # ranks whose part is sent by the linear that computes it

    def run(self, rank: int, peers: PeerBuffers) -> torch.Tensor:
        own, is_sent = self.parts[rank], rank in self.senders
        if is_sent:
            own = compute_and_send(own, peers)
        return gather_columns(own, peers, is_sent)


def make_calls(world: int, width: int, dtype: torch.dtype) -> list[Call]:
    generator = torch.Generator().manual_seed(world)
    calls = []
    for i in range(NUM_CALLS):
        rows = (5 * i) % (MAX_ROWS + 1)  # none at first
        parts = [torch.randn(rows, width, generator=generator).to(dtype).to(DEVICE) for _ in range(world)]
        # all, none, or some of them
        senders = tuple(range(i % 3, world)) if can_compute(dtype) and i % 4 else ()
        if rows and not senders:
            parts[0][0, 0] = torch.nan  # as a model may compute
        calls.append(Call(parts, senders))
    return calls


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.gather_columns.triton.most_programs", lambda *_: MOST_PROGRAMS)
    monkeypatch.setattr("kernels.gather_columns.triton._BLOCK", BLOCK)


@pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter")
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_in_processes_equal_the_reference(world: int) -> None:
    sets = shared_sets(world, MAX_ROWS, 72)
    start_processes(_run_rank, (sets,), nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
    assert are_empty(sets)


def _run_rank(rank: int, sets: list[PeerSets]) -> None:
    torch.set_num_threads(1)
    for i, call in enumerate(make_calls(len(sets), 72, torch.float32)):
        got = call.run(rank, sets[rank][i % NUM_SETS])
        torch.testing.assert_close(got, reference(call.parts), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_in_streams_equal_the_reference(world: int, dtype: torch.dtype) -> None:
    sets = shared_sets(world, MAX_ROWS, 1000, dtype)
    calls = make_calls(world, 1000, dtype)
    warm = Call([calls[1].parts[0]] * world, ())
    for is_sent in {False, can_compute(dtype)}:
        for rank in range(world):
            run_alone(warm._replace(senders=(rank,) if is_sent else ()), rank, sets)
    for call, ranks in zip(calls, run_in_streams(calls, sets), strict=True):
        for got in ranks:
            torch.testing.assert_close(got, reference(call.parts), rtol=0, atol=0, equal_nan=True)
    assert are_empty(sets)
