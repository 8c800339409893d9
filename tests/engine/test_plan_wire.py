from __future__ import annotations

import random
import statistics
import time
from array import array
from dataclasses import replace

import pytest

from engine.plan import PENDING, AdapterLoad, ScheduledChunk, StepPlan
from engine.tensor_parallel.plan_wire import PlanDecoder, PlanEncoder
from tests.engine.test_scheduler_soak import Soak

EMPTY = StepPlan((), (), (), (), (), (), ())


class Wire:
    """Both ends, with the names that rank 0 knows turned into numbers and back."""

    def __init__(self) -> None:
        self.encoder = PlanEncoder(with_freed_pages=True)
        self.decoder = PlanDecoder()
        self.requests: dict[str, int] = {}
        self.digests: dict[str, int] = {}

    def send(self, plan: StepPlan) -> StepPlan:
        for chunk in plan.chunks:
            self.requests.setdefault(chunk.request_id, len(self.requests))
        for load in plan.loads:
            self.digests.setdefault(load.digest, len(self.digests))
        return self.decoder.decode(self.encoder.encode(plan, self.requests, self.digests))

    def expected(self, plan: StepPlan) -> StepPlan:
        """Without what runners have no use for."""
        return replace(
            plan,
            evictions=tuple(e._replace(digest="", page_ids=()) for e in plan.evictions),
            loads=tuple(replace(load, digest=str(self.digests[load.digest])) for load in plan.loads),
            chunks=tuple(c._replace(request_id=str(self.requests[c.request_id])) for c in plan.chunks),
            preempted=tuple(str(self.requests[r]) for r in plan.preempted),
            admitted=(),
            missing=(),
        )


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_of_a_soak_arrives_as_it_was_sent(seed: int) -> None:
    wire = Wire()
    soak = Soak(seed)
    schedule = soak.simulation.scheduler.schedule

    def spy(*args: object) -> StepPlan:
        plan = schedule(*args)  # type: ignore[arg-type]
        sent, expected = wire.send(plan), wire.expected(plan)
        assert [e.slot for e in sent.evictions] == [e.slot for e in expected.evictions]
        assert replace(sent, evictions=()) == replace(expected, evictions=())
        return plan

    soak.simulation.scheduler.schedule = spy  # type: ignore[assignment,method-assign]
    soak.run()


def decodes(step: int, num: int = 64) -> StepPlan:
    pages = 40 + step // 16
    chunks = (
        ScheduledChunk(
            f"r{i}", 639 + step, (PENDING,), array("i", range(100 * i, 100 * i + pages)), i % 64, True
        )
        for i in range(num)
    )
    return replace(EMPTY, chunks=tuple(chunks))


def test_a_step_of_decodes_takes_eight_numbers_a_request() -> None:
    wire = Wire()
    wire.send(decodes(0))
    payload = wire.encoder.encode(decodes(1), wire.requests, wire.digests)
    assert len(payload) == 4 * (5 + 64 * 8)


def test_loads_carry_their_pages() -> None:
    plan = replace(EMPTY, loads=(AdapterLoad("0", 3, (5, 6), after_steps=True),))
    assert Wire().send(plan) == plan


def test_a_step_is_encoded_in_a_fraction_of_its_time() -> None:
    wire = Wire()
    wire.send(decodes(0))
    seconds = []
    for step in range(1, 31):
        plan = decodes(step)
        started = time.perf_counter()
        wire.encoder.encode(plan, wire.requests, wire.digests)
        seconds.append(time.perf_counter() - started)
    assert statistics.median(seconds) < 1e-3


def test_a_preempted_request_starts_on_other_pages() -> None:
    wire = Wire()
    rng = random.Random(0)
    for _ in range(50):
        pages = array("i", (rng.randrange(6) for _ in range(rng.randint(1, 5))))
        plan = replace(EMPTY, chunks=(ScheduledChunk("0", 0, (1, 2), pages, -1, samples=False),))
        assert wire.send(plan) == plan
