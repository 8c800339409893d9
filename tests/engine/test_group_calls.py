"""The other ranks make each call of the runner that rank 0 makes, in the same order, with steps ahead too."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.adapters.image import AdapterImage
from engine.plan import ScheduledChunk, StepPlan
from engine.runner.base import SampledToken
from engine.sampling_params import SamplingParams
from engine.tensor_parallel.group import Group, GroupRunner
from engine.tensor_parallel.messages import Kind
from engine.tensor_parallel.worker import Worker
from tests.engine.fakes import FakeRunner, Harness


class Recorder(FakeRunner):
    """Notes calls by request number: the order of starts is the same on all ranks."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(max_in_flight)
        self.calls: list[Any] = []
        self._numbers: dict[str, int] = {}
        self._num_started = 0

    def start(self, request_id: str, params: SamplingParams, seed: int, prompt: tuple[int, ...]) -> None:
        super().start(request_id, params, seed, prompt)
        self._numbers[request_id] = self._num_started
        self._num_started += 1
        self.calls.append(("start", params, seed))

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        self.calls.append(("finish", self._numbers.get(request_id)))

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        super().submit(plan, images)
        self.calls.append(
            (
                "submit",
                [self._chunk(chunk) for chunk in plan.chunks],
                [(load.slot, load.page_ids, load.after_steps) for load in plan.loads],
                [eviction.slot for eviction in plan.evictions],
                [self._numbers[request_id] for request_id in plan.preempted],
                plan.freed_pages,
            )
        )

    def collect(self) -> list[SampledToken]:
        self.calls.append("collect")
        return super().collect()

    def _chunk(self, chunk: ScheduledChunk) -> tuple[Any, ...]:
        number = self._numbers[chunk.request_id]
        return number, chunk.start, chunk.token_ids, chunk.page_ids, chunk.adapter_slot, chunk.samples

    def _token(self, slot: int) -> int:
        return 7  # ranks know digests by different names


class Pair:
    """Rank 0's runner, and a worker on a thread behind a socket."""

    def __init__(self, max_in_flight: int) -> None:
        ours, theirs = socket.socketpair()
        self.sock = ours
        self.first, self.second = Recorder(max_in_flight), Recorder(max_in_flight)
        self.is_watched = False
        group = SimpleNamespace(
            send=self._send, enter_step=self._watch, leave_step=self._unwatch, number_of=lambda image: 0
        )
        self.runner = GroupRunner(self.first, cast("Group", group), with_freed_pages=True)
        built = SimpleNamespace(runner=self.second, form=None)
        self.worker = Worker(theirs, cast("Any", built), num_loads=1, reader=cast("Any", None))
        # one image stands for all that are read
        self.worker._images = cast("dict[int, AdapterImage]", {0: SimpleNamespace(digest="0")})
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _send(self, frame: bytes) -> None:
        """Plans are what may fill the stream to a rank that hangs."""
        assert self.is_watched or frame[0] != Kind.STEP
        self.sock.sendall(frame)

    def _watch(self) -> None:
        self.is_watched = True

    def _unwatch(self) -> None:
        self.is_watched = False

    def _run(self) -> None:
        with pytest.raises(EOFError):
            self.worker.run()

    def close(self) -> None:
        self.sock.close()
        self.thread.join(timeout=10)
        assert not self.thread.is_alive()
        self.worker._sock.close()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_before", [0, (1 << 31) - 10])
def test_all_ranks_make_the_same_calls(seed: int, max_in_flight: int, num_before: int) -> None:
    """Also after more requests than an int32 counts: a busy group has them in a few weeks."""
    rng = random.Random(seed)
    pair = Pair(max_in_flight)
    pair.runner._numbers = itertools.count(num_before)
    harness = Harness(num_pages=30, max_in_flight=max_in_flight, max_num_batched_tokens=24)
    harness.core._runner = pair.runner
    harness.runner = pair.first
    for step in range(120):
        if rng.random() < 0.4:
            stop = (7,) if rng.random() < 0.3 else ()
            harness.add(
                f"r{step}", length=rng.randint(1, 30), max_tokens=rng.randint(1, 40), stop_token_ids=stop
            )
        if rng.random() < 0.05 and harness.core.requests:
            harness.core.abort(rng.choice(list(harness.core.requests)))
        harness.step()
    harness.run()
    pair.close()
    assert pair.first.calls.count("collect") == pair.second.calls.count("collect")
    assert _comparable(pair.second.calls) == _comparable(pair.first.calls)


def _comparable(calls: list[Any]) -> list[Any]:
    """Without finishes of requests that never started, which rank 0 keeps to itself, and without collects: of
    steps that compute nothing, rank 0 may collect one a finish later.
    """
    return [call for call in calls if call not in (("finish", None), "collect")]
