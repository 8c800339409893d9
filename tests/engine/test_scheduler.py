"""What the scheduler promises, one test a promise; random load is in test_scheduler_soak.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.admission import Admission, Lack
from engine.errors import RequestTooLarge
from engine.memory import EvictionCause, PoolMemory
from engine.plan import PENDING, StepPlan
from engine.scheduler import MAX_LACKING, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from tests.engine.simulation import VOCAB, Simulation


def sizes(plan: StepPlan) -> dict[str, int]:
    return {c.request_id: len(c.token_ids) for c in plan.chunks}


def test_the_pure_core_loads_neither_torch_nor_ray() -> None:
    code = "import sys, engine.scheduler; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- token budget


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_one_samples() -> None:
    simulation = Simulation(num_pages=8, max_num_batched_tokens=8)
    simulation.submit("a", 18, max_tokens=2)
    chunks = [plan.chunks[0] for plan in simulation.steps(4)]
    assert [(c.start, len(c.token_ids), c.samples) for c in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 2, True),
        (18, 1, True),
    ]


def test_prefill_gets_what_decodes_leave() -> None:
    simulation = Simulation(num_pages=40, max_num_batched_tokens=8)
    for name in "abc":
        simulation.submit(name, 2, max_tokens=20)
    simulation.step()
    simulation.submit("long", 12)
    assert sizes(simulation.step()) == {"a": 1, "b": 1, "c": 1, "long": 5}
    assert sizes(simulation.step()) == {"a": 1, "b": 1, "c": 1, "long": 5}
    assert sizes(simulation.step()) == {"a": 1, "b": 1, "c": 1, "long": 2}


def test_an_older_prefill_does_not_take_the_place_of_younger_decodes() -> None:
    simulation = Simulation(num_pages=40, max_num_batched_tokens=8)
    simulation.submit("young", 2, max_tokens=20, arrival=1)
    simulation.step()
    simulation.submit("old", 30, arrival=0)
    simulation.step()
    for _ in range(3):
        assert sizes(simulation.step()) == {"old": 7, "young": 1}


def test_no_more_requests_run_than_allowed() -> None:
    simulation = Simulation(num_pages=40, max_num_seqs=2)
    for name in "abc":
        simulation.submit(name, 2, max_tokens=3)
    assert simulation.step().admitted == ("a", "b")
    assert simulation.step().admitted == ()
    simulation.run_to_end()
    simulation.check_ends()


def test_a_step_is_scheduled_before_the_tokens_of_the_one_before_are_known() -> None:
    simulation = Simulation(num_pages=8, max_in_flight=2)
    simulation.submit("a", 3, max_tokens=4)
    chunks = [chunk for plan in simulation.steps(2) for chunk in plan.chunks]
    assert [(chunk.start, chunk.token_ids[-1], chunk.samples) for chunk in chunks] == [
        (0, simulation.clients["a"].prompt[-1], True),
        (3, PENDING, True),
    ]
    assert len(simulation.clients["a"].output) == 1
    simulation.run_to_end()
    simulation.check_ends()


def test_nothing_is_computed_past_the_last_token_that_a_request_may_have() -> None:
    simulation = Simulation(num_pages=8, max_in_flight=2)
    simulation.submit("a", 3, max_tokens=2)
    assert [sizes(plan) for plan in simulation.steps(3)] == [{"a": 3}, {"a": 1}, {}]
    simulation.check_ends()


def test_a_stop_token_is_noticed_one_step_late_and_its_step_is_dropped() -> None:
    simulation = Simulation(num_pages=8, max_in_flight=2)
    simulation.submit("a", 3, max_tokens=9, stop_token_ids=frozenset(range(VOCAB)))
    assert [sizes(plan) for plan in simulation.steps(3)] == [{"a": 3}, {"a": 1}, {}]
    simulation.check_ends()
    simulation.check_nothing_leaked()


def test_a_request_preempted_with_a_token_in_flight_keeps_it() -> None:
    simulation = Simulation(num_pages=5, max_in_flight=2, prefix_cache=False)
    simulation.submit("old", 6, max_tokens=10)
    simulation.submit("young", 6, max_tokens=6)
    plans = simulation.steps(12)
    assert any(plan.preempted == ("young",) for plan in plans)
    simulation.run_to_end()
    simulation.check_ends()


def test_a_budget_below_one_token_a_request_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        Scheduler(
            SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8, max_model_len=9), PoolMemory(1, 4, 1)
        )


def test_the_place_in_the_budget_of_a_preempted_decode_goes_to_a_prefill() -> None:
    simulation = Simulation(num_pages=15, max_num_batched_tokens=8, prefix_cache=False)
    simulation.submit("young", 2, max_tokens=9, arrival=2)
    simulation.submit("old", 3, max_tokens=30, arrival=0)
    simulation.steps(3)
    simulation.submit("prefill", 40, arrival=1)
    for plan in simulation.steps(3):
        assert sizes(plan) == {"old": 1, "young": 1, "prefill": 6}
    plan = simulation.step()
    assert plan.preempted == ("young",)
    assert sizes(plan) == {"old": 1, "prefill": 7}


# --- what can never fit


def test_an_oversized_request_is_refused_with_both_numbers_and_the_next_one_is_served() -> None:
    """FR-36: within the model's limit, but over the pool."""
    scheduler = Scheduler(
        SchedulerConfig(8, 2048, max_model_len=2048), PoolMemory(50, page_tokens=16, num_slots=1)
    )
    with pytest.raises(
        RequestTooLarge, match=r"1002 prompt tokens and 10 output .* 1012, .* 800 tokens"
    ) as e:
        scheduler.add(Sequence("big", 0, tuple(range(1002)), max_tokens=10))
    assert e.value.param == "prompt"
    assert not scheduler.has_work
    scheduler.add(Sequence("short", 1, tuple(range(10)), max_tokens=10))
    assert scheduler.schedule(0.0).admitted == ("short",)


def test_an_output_limit_that_cannot_fit_is_blamed_on_max_tokens() -> None:
    simulation = Simulation(num_pages=40, max_model_len=20)
    with pytest.raises(RequestTooLarge) as e:
        simulation.submit("a", 10, max_tokens=11)
    assert e.value.param == "max_tokens"
    simulation.submit("a", 10, max_tokens=10)


def test_capacity_is_net_of_pinned_adapters_and_of_the_requests_own() -> None:
    """FR-36. An adapter that is pinned and its own counts once."""
    simulation = Simulation(num_pages=12, num_slots=2)
    simulation.submit("loads", 2, digest="pinned", adapter_pages=5)
    simulation.run_to_end()
    capacity = simulation.scheduler.capacity_tokens
    assert capacity() == 12 * 4
    assert capacity("pinned", 5) == 7 * 4
    simulation.memory.residency.pin("pinned", 5)
    assert capacity() == 7 * 4
    assert capacity("pinned", 5) == 7 * 4
    assert capacity("other", 3) == 4 * 4
    assert capacity("huge", 99) == 0


def test_a_request_of_exactly_the_capacity_runs_to_its_end() -> None:
    simulation = Simulation(num_pages=8, num_slots=1)
    simulation.submit("idle", 4, digest="b", adapter_pages=2)
    simulation.run_to_end()
    capacity = simulation.scheduler.capacity_tokens("a", 3)
    simulation.submit("full", 5, max_tokens=capacity - 5, digest="a", adapter_pages=3)
    simulation.run_to_end()
    simulation.check_ends()


# --- preemption


def test_the_youngest_gives_up_its_pages_and_continues_with_its_tokens_kept() -> None:
    simulation = Simulation(num_pages=4, prefix_cache=False)
    simulation.submit("old", 3, max_tokens=13)
    simulation.submit("young", 3, max_tokens=13)
    # the 9th token of each would need a third page
    assert [p.preempted for p in simulation.steps(7)] == [()] * 6 + [("young",)]
    young = simulation.scheduler.sequences["young"]
    assert not young.is_running
    assert young.num_outputs == 6
    assert simulation.running() == {"old"}
    simulation.run_to_end()
    simulation.check_ends()


def test_the_step_of_a_preemption_admits_nobody() -> None:
    simulation = Simulation(num_pages=4, prefix_cache=False)
    simulation.submit("old", 3, max_tokens=13)
    simulation.submit("young", 3, max_tokens=13)
    while not (plan := simulation.step()).preempted:
        simulation.submit(f"tiny {simulation.now}", 1)
    assert plan.admitted == ()


def test_pages_are_left_for_the_growth_of_those_that_run() -> None:
    simulation = Simulation(num_pages=8, prefix_cache=False, spare_pages=2)
    simulation.submit("alone", 29, max_tokens=3)  # 8 pages with its output: nobody else runs
    assert simulation.step().admitted == ("alone",)
    simulation.run_to_end()
    for name in "abc":
        simulation.submit(name, 6, max_tokens=6)
    assert simulation.step().admitted == ("a", "b")  # 2 pages each, and 2 spare for each of those before
    simulation.run_to_end()
    simulation.check_ends()


# --- overtaking


def test_who_was_admitted_before_a_request_has_not_overtaken_it() -> None:
    simulation = Simulation(num_pages=40, num_slots=1)
    for name, digest in (("old", "A"), ("old too", "A"), ("B", "B"), ("young", "A")):
        simulation.submit(name, 3, max_tokens=4, digest=digest)
    assert simulation.step().admitted == ("old", "old too", "young")
    assert simulation.scheduler.sequences["B"].num_overtaken == 1


def test_a_request_without_a_slot_is_overtaken_only_so_often() -> None:
    """FR-32: 1 slot, a steady stream for A, one request for B."""
    simulation = Simulation(num_pages=60, num_slots=1, max_num_seqs=4, max_overtakes=5)
    simulation.submit("A0", 3, max_tokens=4, digest="A")
    simulation.step()
    simulation.submit("B", 3, digest="B")
    num_overtakes = 0
    for i in range(1, 100):
        simulation.submit(f"A{i}", 3, max_tokens=4, digest="A")
        plan = simulation.step()
        if "B" in plan.admitted:
            break
        num_overtakes += len(plan.admitted)
    assert num_overtakes == 5
    simulation.run_to_end()
    simulation.check_ends()


def test_a_request_without_a_slot_waits_only_so_long() -> None:
    """FR-32: by time, when nobody is admitted past it."""
    simulation = Simulation(num_pages=60, num_slots=1, max_overtakes=1000, max_overtaken_s=2.0)
    simulation.submit("A", 3, max_tokens=8, digest="A")
    simulation.step()
    simulation.submit("B", 3, digest="B")
    admitted = []
    for i in range(4):
        simulation.submit(f"A{i}", 3, max_tokens=8, digest="A")
        admitted.append(simulation.step().admitted)
    assert admitted == [("A0",), ("A1",), (), ()]


def test_a_pinned_adapter_is_not_the_one_to_drain() -> None:
    simulation = Simulation(num_pages=100, num_slots=2, max_overtakes=0)
    for name, digest in (("1", "busy"), ("2", "busy"), ("3", "pinned")):
        simulation.submit(name, 3, max_tokens=6, digest=digest)
    simulation.step()
    simulation.memory.residency.pin("pinned", 1)
    for name, digest in (("B", "B"), ("4", "pinned"), ("5", "busy")):
        simulation.submit(name, 3, max_tokens=6, digest=digest)
    assert simulation.step().admitted == ("4",)
    simulation.run_to_end()
    simulation.check_ends()


def test_one_adapter_drains_at_a_time_the_one_with_the_fewest_running_requests() -> None:
    simulation = Simulation(num_pages=100, num_slots=2, max_num_seqs=16, max_overtakes=0)
    for name, digest in (("1", "busy"), ("2", "busy"), ("3", "calm")):
        simulation.submit(name, 3, max_tokens=6, digest=digest)
    simulation.step()
    for name, digest in (("B", "B"), ("C", "C"), ("4", "calm"), ("5", "busy")):
        simulation.submit(name, 3, max_tokens=6, digest=digest)
    simulation.submit("6", 3, max_tokens=6)
    assert simulation.step().admitted == ("5", "6")
    simulation.run_to_end()
    simulation.check_ends()


def preempt_the_owner_of_a_slot(num_slots: int, digest: str | None) -> Simulation:
    """ "B" starves for a slot; an idle adapter is kept for "yields", which is older and lacks pages."""
    simulation = Simulation(num_pages=12, num_slots=num_slots, max_overtaken_s=2.0, prefix_cache=False)
    simulation.submit("grows", 3, max_tokens=40, digest=digest)
    simulation.submit("yields", 20, max_tokens=20, digest="idle")
    simulation.step()
    simulation.submit("B", 3, digest="B")
    while not simulation.step().preempted:
        pass
    assert simulation.running() == {"grows"}
    return simulation


def test_an_adapter_that_older_requests_wait_for_is_not_the_one_to_drain() -> None:
    simulation = preempt_the_owner_of_a_slot(num_slots=2, digest="busy")
    simulation.submit("young", 1, digest="busy")
    assert simulation.step().admitted == ()
    simulation.run_to_end()
    simulation.check_ends()


def test_without_a_slot_that_could_be_freed_for_it_a_starving_request_holds_up_nobody() -> None:
    simulation = preempt_the_owner_of_a_slot(num_slots=1, digest=None)
    simulation.submit("young", 1)
    assert simulation.step().admitted == ("young",)
    simulation.run_to_end()
    simulation.check_ends()


def test_a_request_that_lacks_pages_is_overtaken_only_so_often() -> None:
    """FR-32: past the limit nobody is admitted until it is."""
    simulation = Simulation(num_pages=20, max_num_seqs=4, max_overtakes=3, prefix_cache=False)
    simulation.submit("runs", 30, max_tokens=30)
    simulation.step()
    simulation.submit("large", 60)
    num_overtakes = 0
    for i in range(60):
        simulation.submit(f"small {i}", 1)
        plan = simulation.step()
        if "large" in plan.admitted:
            break
        num_overtakes += len(plan.admitted)
    assert num_overtakes == 3
    simulation.run_to_end()
    simulation.check_ends()


def test_a_request_that_lacks_a_slot_and_then_pages_is_not_starved_by_those_that_need_no_slot() -> None:
    """FR-32: the only slot falls idle, but a stream of base requests holds the pages it needs."""
    simulation = Simulation(num_pages=14, num_slots=1, max_num_seqs=6, max_overtakes=8, prefix_cache=False)
    simulation.submit("A", 3, max_tokens=18, digest="A")
    simulation.step()
    simulation.submit("B", 37, digest="B")
    for i in range(30):  # there is always room for one of them, and never for B beside them
        simulation.submit(f"base {i}", 3, max_tokens=8)
        simulation.steps(3)
    assert simulation.clients["B"].end == "length"
    simulation.run_to_end()
    simulation.check_ends()


# --- unload and abort


def test_an_adapter_that_went_may_come_again_and_stay() -> None:
    simulation = Simulation(num_pages=30)
    simulation.submit("runs", 3, max_tokens=3, digest="b")
    simulation.step()
    simulation.scheduler.retire("b")
    simulation.run_to_end()
    assert simulation.resident() == set()
    simulation.submit("later", 3, digest="b")
    simulation.run_to_end()
    assert simulation.resident() == {"b"}


def test_an_unloaded_adapter_goes_when_its_last_request_has_ended() -> None:
    """FR-28: running and waiting requests finish on it; then pages and slot are as before the load."""
    simulation = Simulation(num_pages=30, num_slots=1, max_num_seqs=1)
    simulation.submit("runs", 5, max_tokens=3, digest="b", adapter_pages=4)
    simulation.submit("waits", 5, digest="b", adapter_pages=4)
    simulation.step()
    simulation.scheduler.retire("b")
    simulation.step()
    assert simulation.resident() == {"b"}
    simulation.run_to_end()
    simulation.check_ends()
    assert simulation.memory.pool.num_free == 30
    simulation.submit("next", 3)
    (eviction,) = simulation.step().evictions
    assert (eviction.digest, eviction.cause) == ("b", EvictionCause.UNLOADED)


def test_unloading_lifts_the_pin() -> None:
    simulation = Simulation(num_pages=30, num_slots=1)
    simulation.submit("loads", 3, digest="b")
    simulation.run_to_end()
    simulation.memory.residency.pin("b", 1)
    simulation.scheduler.retire("b")
    assert simulation.resident() == set()


def test_retiring_what_is_not_resident_changes_nothing() -> None:
    simulation = Simulation(num_pages=30)
    simulation.scheduler.retire("never loaded")
    assert simulation.step().evictions == ()


def test_an_adapter_that_is_wanted_again_before_it_went_stays() -> None:
    simulation = Simulation(num_pages=30)
    simulation.submit("runs", 3, max_tokens=3, digest="b")
    simulation.step()
    simulation.scheduler.retire("b")
    simulation.scheduler.keep("b")
    simulation.run_to_end()
    assert simulation.resident() == {"b"}


def test_a_request_that_is_aborted_while_its_step_runs_returns_everything() -> None:
    simulation = Simulation(num_pages=30)
    simulation.submit("a", 9, max_tokens=5, digest="x")
    simulation.step(during=lambda: simulation.abort("a"))
    assert "a" not in simulation.scheduler.sequences
    simulation.check_ends()
    simulation.check_nothing_leaked()


# --- a long queue


@pytest.mark.parametrize(
    ("digests", "most"),
    [
        ([None], MAX_LACKING),  # pages
        (["B"], 1),  # a slot
        ([f"B{i}" for i in range(1000)], MAX_LACKING),  # as many slots
    ],
)
def test_a_long_queue_of_blocked_requests_costs_few_looks(
    digests: list[str | None], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step must stay short with 1000 waiting requests, whatever they lack."""
    tried: list[str] = []
    start = Admission.start

    def count(admission: Admission, seq: Sequence, num_spare_pages: int) -> Lack | None:
        tried.append(seq.request_id)
        return start(admission, seq, num_spare_pages)

    simulation = Simulation(20, num_slots=1)
    simulation.submit("runs", 40, max_tokens=30, digest="A")
    simulation.step()
    for i in range(1000):
        simulation.submit(f"{i}", 40, digest=digests[i % len(digests)])
    monkeypatch.setattr(Admission, "start", count)
    plan = simulation.step()
    assert sizes(plan) == {"runs": 1}
    assert 1 <= len(tried) <= most


@pytest.mark.parametrize("digest", ["A", None])
def test_who_needs_no_slot_starts_behind_many_that_lack_one(digest: str | None) -> None:
    simulation = Simulation(100, num_slots=1)
    simulation.submit("runs", 4, max_tokens=30, digest="A")
    simulation.step()
    for i in range(2 * MAX_LACKING):
        simulation.submit(f"{i}", 4, digest=f"B{i}")
    simulation.submit("starts", 4, digest=digest)
    assert simulation.step().admitted == ("starts",)
