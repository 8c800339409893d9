"""The fused all-reduce against its reference: ranks are processes in the interpreter, streams on a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from kernels.all_reduce.reference import all_reduce_add_rms_norm as reference
from kernels.all_reduce.triton import MOST_AT_ONCE, all_reduce_add_rms_norm
from kernels.linear.triton import linear, linear_to_peers
from kernels.peers.triton import NUM_SETS, PeerBuffers, PeerSets
from tests.kernels.peer_memory import (
    are_empty,
    can_compute,
    compute_and_send,
    run_alone,
    run_in_streams,
    send_rows,
    shared_sets,
)
from tests.kernels.triton_cases import DEVICE, ULP, adapter_slots, randn

EPS = 1e-5
MAX_ROWS = 8
MOST_PROGRAMS = 3  # so that some take several rows
NUM_CALLS = 8  # each set several times, by different numbers of rows


class Call(NamedTuple):
    residual: torch.Tensor
    ys: list[torch.Tensor]  # of each rank
    deltas: list[torch.Tensor]
    slots: torch.Tensor
    weight: torch.Tensor
    has_delta: bool
    senders: tuple[int, ...]  # ranks whose part is sent by the linear that computes it
    delta_peers: tuple[PeerBuffers, ...] | None  # of each rank, where deltas are sent apart

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        deltas = self.deltas if self.has_delta else None
        return reference(self.residual, self.ys, deltas, self.slots, self.weight, EPS)

    def run(self, rank: int, peers: PeerBuffers) -> tuple[torch.Tensor, torch.Tensor]:
        residual, y, is_sent = self.residual.clone(), self.ys[rank], rank in self.senders
        if is_sent:
            y = compute_and_send(y, peers)
        delta, slots = (self.deltas[rank], self.slots) if self.has_delta else (None, None)
        delta_peers = None
        if self.delta_peers is not None:
            delta_peers = self.delta_peers[rank]
            send_rows(self.deltas[rank], self.slots, delta_peers)
        out = all_reduce_add_rms_norm(
            residual, y, self.weight, EPS, peers, delta, slots, False, is_sent, delta_peers
        )
        return residual, out


def make_calls(world: int, width: int, dtype: torch.dtype, delta_sets: list[PeerSets]) -> list[Call]:
    generator = torch.Generator().manual_seed(world)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    calls = []
    for i in range(NUM_CALLS):
        rows = 1 + (5 * i) % MAX_ROWS
        slots = adapter_slots(rows)
        deltas = [randn(rows, width) for _ in range(world)]
        for delta in deltas:
            delta[slots < 0] = torch.nan  # no kernel may look there
        ys = [randn(rows, width) for _ in range(world)]
        kind = ("no delta", "delta", "delta apart", "delta apart")[i % 4]
        # all, none, or some of them
        senders = tuple(range(i // 2 % 3, world)) if can_compute(dtype) and kind != "delta" else ()
        delta_peers = tuple(sets[i % NUM_SETS] for sets in delta_sets) if kind == "delta apart" else None
        has_delta = kind != "no delta"
        weight = randn(width)
        calls.append(Call(randn(rows, width), ys, deltas, slots, weight, has_delta, senders, delta_peers))
    return calls


def check(call: Call, residual: torch.Tensor, out: torch.Tensor) -> None:
    want_residual, want_out = call.want()
    assert torch.equal(residual, want_residual)
    torch.testing.assert_close(out.float(), want_out.float(), rtol=2 * ULP[out.dtype], atol=1e-6)


@pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter")
@pytest.mark.parametrize(("world", "most_at_once"), [(2, MOST_AT_ONCE), (3, MOST_AT_ONCE), (3, 0)])
def test_ranks_in_processes_equal_the_reference(
    world: int, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.all_reduce.triton.most_programs", lambda *_, **__: MOST_PROGRAMS)
    monkeypatch.setattr("kernels.all_reduce.triton.MOST_AT_ONCE", most_at_once)  # 0: two ranks' at a time
    sets, delta_sets = (shared_sets(world, MAX_ROWS, 200) for _ in range(2))
    arguments = (sets, delta_sets)
    start_processes(_run_rank, arguments, nprocs=world, start_method="fork")  # type: ignore[no-untyped-call]
    assert are_empty(sets)
    assert are_empty(delta_sets)


def _run_rank(rank: int, sets: list[PeerSets], delta_sets: list[PeerSets]) -> None:
    torch.set_num_threads(1)
    for i, call in enumerate(make_calls(len(sets), 200, torch.float32, delta_sets)):
        check(call, *call.run(rank, sets[rank][i % NUM_SETS]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [200, 4096])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_in_streams_equal_the_reference(
    world: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.all_reduce.triton.most_programs", lambda *_, **__: MOST_PROGRAMS)
    sets, delta_sets = (shared_sets(world, MAX_ROWS, width, dtype) for _ in range(2))
    calls = make_calls(world, width, dtype, delta_sets)
    for warm, rank in itertools.product(calls[:3], range(world)):
        run_alone(warm._replace(senders=()), rank, sets, delta_sets)
        if can_compute(dtype) and (warm.delta_peers is not None or not warm.has_delta):
            run_alone(warm._replace(senders=(rank,)), rank, sets, delta_sets)
    for call, ranks in zip(calls, run_in_streams(calls, sets), strict=True):
        for residual, out in ranks:
            check(call, residual, out)
    assert are_empty(sets)
    assert are_empty(delta_sets)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_sums_what_has_come_while_the_product_runs(num_rows: int) -> None:
    """Dependent launches give the bits of launches that wait for each other."""
    torch.manual_seed(0)
    width, dtype = 4096, torch.bfloat16
    peers = shared_sets(2, 64, width, dtype)[0][0]
    weights = [randn(width, width, dtype=dtype, scale=0.02) for _ in range(3)]
    x, theirs, before = (randn(num_rows, width, dtype=dtype) for _ in range(3))
    norm = randn(width, dtype=dtype)
    y = linear(linear(x, weights[0]), weights[1])
    want_residual, want_out = reference(before, [y, theirs], None, adapter_slots(num_rows), norm, EPS)
    residual = before.clone()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        residual.copy_(before)
        y, is_sent = linear_to_peers(linear(x, weights[0], pdl=True), weights[1], peers, pdl=True)
        assert is_sent
        out = all_reduce_add_rms_norm(residual, y, norm, EPS, peers, pdl=True, is_sent=True)
        return out, linear(out, weights[2], pdl=True)

    peers.rows[0][1, :num_rows] = theirs
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = step()
    for _ in range(20):
        for buffer in (residual, out, after):
            buffer.fill_(torch.nan)
        peers.rows[0][1, :num_rows] = theirs
        graph.replay()
        assert torch.equal(residual, want_residual)
        torch.testing.assert_close(out.float(), want_out.float(), rtol=2 * ULP[dtype], atol=1e-6)
        assert torch.equal(after, linear(out, weights[2]))


def test_more_rows_than_there_is_room_for_are_a_bug_of_the_caller(tmp_path: Path) -> None:
    peers, _ = shared_sets(2, 2, 8)[0]
    with pytest.raises(AssertionError):
        all_reduce_add_rms_norm(torch.zeros(3, 8), torch.zeros(3, 8), torch.ones(8), EPS, peers)
