"""Copies of adapters to the device: what waits for them, and what does not."""

from __future__ import annotations

import pytest

from engine.copy_clock import MOST_BACKLOG_S, CopyClock
from engine.step_clock import StepClock
from tests.engine.simulation import Simulation


def test_copies_queue_up_behind_each_other() -> None:
    clock = CopyClock(seconds_per_page=0.5)
    assert clock.add(2, now=10.0) == 11.0
    assert clock.add(1, now=10.2) == 11.5
    assert clock.is_backed_up(11.5 - 2 * MOST_BACKLOG_S)
    assert not clock.is_backed_up(11.5 - 0.5 * MOST_BACKLOG_S)
    assert clock.add(1, now=20.0) == 20.5


def test_the_device_is_free_when_a_step_like_the_last_ones_ends() -> None:
    clock = StepClock()
    assert clock.free_at(1.0) == 1.0
    for start in range(20):
        clock.submitted(float(start))
        clock.collected(start + 0.25, is_last=True)
    clock.submitted(30.0)
    clock.submitted(30.1)
    assert clock.free_at(30.1) == pytest.approx(30.25)
    clock.collected(30.25, is_last=False)
    assert clock.free_at(30.3) == pytest.approx(30.5)
    assert clock.free_at(31.0) == 31.0, "it should have ended by now"


def test_a_request_starts_when_its_weights_have_arrived_and_the_others_run_on() -> None:
    """FR-34, between host memory and the device."""
    simulation = Simulation(num_pages=40, page_copy_s=0.6)
    simulation.submit("warm", 2, max_tokens=9)
    simulation.step()
    simulation.submit("cold", 2, max_tokens=2, digest="a", adapter_pages=2)
    plans = simulation.steps(3)
    assert [[chunk.request_id for chunk in plan.chunks] for plan in plans] == [
        ["warm"],
        ["warm"],
        ["warm", "cold"],
    ]
    assert [len(plan.loads) for plan in plans] == [1, 0, 0]
    simulation.run_to_end()
    simulation.check_ends()


def test_no_copy_begins_behind_a_long_one_while_others_run() -> None:
    simulation = Simulation(num_pages=40, page_copy_s=0.6)
    simulation.submit("warm", 2, max_tokens=9)
    simulation.step()
    for name in "ab":
        simulation.submit(name, 2, digest=name, adapter_pages=2)
    assert [[load.digest for load in plan.loads] for plan in simulation.steps(3)] == [["a"], [], ["b"]]


def test_where_nobody_runs_the_step_itself_waits() -> None:
    simulation = Simulation(num_pages=40, page_copy_s=0.6)
    simulation.submit("cold", 2, digest="a", adapter_pages=2)
    assert [chunk.request_id for chunk in simulation.step().chunks] == ["cold"]


def test_weights_that_arrive_before_the_step_starts_delay_nothing() -> None:
    simulation = Simulation(num_pages=40, page_copy_s=0.1)
    simulation.submit("warm", 2, max_tokens=9)
    simulation.step()
    simulation.submit("cold", 2, digest="a", adapter_pages=2)
    plan = simulation.scheduler.schedule(now=2.0, starts_at=2.5)
    assert [chunk.request_id for chunk in plan.chunks] == ["warm", "cold"]


def test_an_adapter_on_its_way_is_not_evicted_for_a_younger_request() -> None:
    simulation = Simulation(num_pages=40, num_slots=1, page_copy_s=0.6)
    simulation.submit("warm", 2, max_tokens=20)
    simulation.step()
    for name in "abc":
        simulation.submit(name, 2, digest=name, adapter_pages=2)
    starts: dict[str, int] = {}
    for step in range(12):
        for chunk in simulation.step().chunks:
            starts.setdefault(chunk.request_id, step)
    assert sorted("abc", key=lambda name: starts[name]) == ["a", "b", "c"]
    simulation.run_to_end()
    simulation.check_ends()


def test_an_adapter_on_its_way_keeps_its_slot_where_a_copy_for_another_could_begin() -> None:
    simulation = Simulation(num_pages=40, num_slots=1, page_copy_s=MOST_BACKLOG_S / 4)
    simulation.submit("warm", 2, max_tokens=20)
    simulation.step()
    for name in "ab":
        simulation.submit(name, 2, digest=name, adapter_pages=2)
    assert [load.digest for load in simulation.scheduler.schedule(now=2.0).loads] == ["a"]
    plan = simulation.scheduler.schedule(now=2.001)
    assert (plan.loads, plan.evictions) == ((), ())


def test_a_copy_that_waits_for_the_step_in_flight_holds_up_no_later_one() -> None:
    simulation = Simulation(num_pages=8, num_slots=1, max_in_flight=2, prefix_cache=False, page_copy_s=1e-3)
    simulation.submit("first", 20, max_tokens=1, digest="a", adapter_pages=2)
    simulation.steps(2)
    simulation.submit("second", 2, max_tokens=1, digest="b", adapter_pages=2)
    (load,) = simulation.step().loads
    assert load.after_steps
    simulation.run_to_end()
    simulation.submit("warm", 2, max_tokens=6)
    simulation.step()
    simulation.submit("third", 2, digest="c", adapter_pages=2)
    assert any(len(plan.chunks) == 2 for plan in simulation.steps(3))
    simulation.run_to_end()
    simulation.check_ends()


@pytest.mark.parametrize(("num_steps_idle", "after_steps"), [(0, True), (2, False)])
def test_a_copy_waits_for_the_step_in_flight_only_if_that_may_touch_its_pages(
    num_steps_idle: int, after_steps: bool
) -> None:
    simulation = Simulation(num_pages=8, num_slots=1, max_in_flight=2, prefix_cache=False)
    simulation.submit("first", 20, max_tokens=1, digest="a", adapter_pages=2)
    simulation.steps(2)
    assert simulation.clients["first"].end
    simulation.steps(num_steps_idle)
    simulation.submit("second", 2, max_tokens=1, digest="b", adapter_pages=2)
    (load,) = simulation.step().loads
    assert load.after_steps == after_steps
