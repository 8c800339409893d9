"""Adapters that are copied to the pool before a request asks for them: which, when, and what never yields."""

from __future__ import annotations

import pytest

from engine.eviction import EvictionOrder
from engine.memory import EvictionCause, PoolMemory
from engine.prefetch import HINT_S, Reason
from engine.request import AdapterRef
from tests.engine.fakes import Harness, image
from tests.engine.simulation import PAGE_TOKENS, Simulation

A, B, C = (AdapterRef(name, f"dir/{name}", "1") for name in "abc")


def in_host(simulation: Simulation, **num_pages: int) -> None:
    """As the core does when images have been read; the last one is worth most."""
    for digest, pages in num_pages.items():
        simulation.now += 1.0
        simulation.memory.order.used(digest, simulation.now, count=0.0)
        simulation.scheduler.prefetcher.in_host(digest, pages)


def copied(simulation: Simulation, num_steps: int = 1) -> list[str]:
    return [load.digest for plan in simulation.steps(num_steps) for load in plan.loads]


def counts(simulation: Simulation, reason: Reason) -> tuple[int, int]:
    prefetcher = simulation.scheduler.prefetcher
    return prefetcher.num_copied[reason], prefetcher.num_used[reason]


# --- by popularity


def test_free_pages_are_filled_one_adapter_a_step_those_worth_most_first() -> None:
    simulation = Simulation(num_pages=10, num_slots=4)
    in_host(simulation, old=3, newer=3, newest=3, fits=1)
    assert copied(simulation, 6) == ["fits", "newest", "newer", "old"]


def test_a_smaller_one_is_copied_where_the_best_does_not_fit() -> None:
    simulation = Simulation(num_pages=4, num_slots=4)
    in_host(simulation, small=2, large=5)
    assert copied(simulation, 2) == ["small"]


def test_no_adapter_yields_a_slot_or_pages_to_a_guess() -> None:
    simulation = Simulation(num_pages=6, num_slots=2)
    in_host(simulation, a=2, b=2, c=2)
    assert copied(simulation, 4) == ["c", "b"]
    assert simulation.resident() == {"b", "c"}


def test_a_guess_is_used_when_its_request_comes() -> None:
    simulation = Simulation(num_pages=20)
    in_host(simulation, a=2)
    simulation.step()
    simulation.submit("r", 5, max_tokens=2, digest="a", adapter_pages=2)
    plan = simulation.step()
    assert (plan.loads, plan.admitted) == ((), ("r",))
    simulation.run_to_end()
    assert counts(simulation, Reason.POPULARITY) == (1, 1)


def test_a_guess_that_was_evicted_unused_is_not_made_again_until_somebody_asks() -> None:
    simulation = Simulation(num_pages=8, prefix_cache=False)
    in_host(simulation, guess=4)
    simulation.step()
    simulation.submit("large", 6 * PAGE_TOKENS)
    plan = simulation.step()
    assert [(e.digest, e.cause) for e in plan.evictions] == [("guess", EvictionCause.UNUSED)]
    simulation.run_to_end()
    assert copied(simulation, 3) == []
    simulation.submit("asks", 3, digest="guess", adapter_pages=4)
    simulation.run_to_end()
    simulation.submit("larger", 7 * PAGE_TOKENS)
    assert [e.cause for e in simulation.step().evictions] == [EvictionCause.PAGES]
    simulation.run_to_end()
    assert copied(simulation, 1) == ["guess"]
    assert counts(simulation, Reason.POPULARITY) == (2, 0)


def test_after_a_burst_an_adapter_comes_back_in_place_of_prefixes_that_are_worth_less() -> None:
    simulation = Simulation(num_pages=12)
    for i in range(4):
        simulation.submit(f"r{i}", 3, digest="a", adapter_pages=2)
        simulation.run_to_end()
    simulation.submit("burst", 11 * PAGE_TOKENS)
    simulation.run_to_end()
    simulation.step()
    assert simulation.memory.prefix.num_pages >= 9
    assert simulation.resident() == {"a"}
    # what has never been asked for is worth less than they are
    in_host(simulation, b=8)
    assert copied(simulation, 2) == []


def test_a_guess_takes_the_place_of_prefixes_and_of_no_adapter_that_is_worth_less_than_they_are() -> None:
    memory = PoolMemory(8, PAGE_TOKENS, 3, EvictionOrder("lru"))
    simulation = Simulation(num_pages=8, num_slots=3, memory=memory)
    simulation.submit("old", 2, digest="old", adapter_pages=2)
    simulation.run_to_end()
    simulation.submit("base", 5 * PAGE_TOKENS)
    simulation.run_to_end()
    assert (memory.pool.num_free, memory.prefix.num_pages) == (1, 5)
    memory.order.used("hot", simulation.now + 1.0)
    in_host(simulation, hot=2)
    assert copied(simulation, 1) == ["hot"]
    assert simulation.resident() == {"old", "hot"}
    assert memory.prefix.num_pages == 4


def test_pages_for_the_growth_of_running_requests_stay_free() -> None:
    simulation = Simulation(num_pages=12, num_slots=2, spare_pages=2, page_copy_s=1e-3)
    simulation.submit("r", 5, max_tokens=8)
    simulation.step()
    num_free = simulation.memory.pool.num_free
    in_host(simulation, large=num_free - 1)
    assert copied(simulation, 1) == []
    in_host(simulation, small=num_free - 2)
    assert copied(simulation, 1) == ["small"]
    simulation.run_to_end()
    simulation.check_ends()


def test_nothing_is_copied_behind_another_copy_or_before_a_request_that_waits() -> None:
    simulation = Simulation(num_pages=40, num_slots=6, page_copy_s=1.5)  # a step is one second
    in_host(simulation, a=1, b=1, c=1, d=1)
    assert [len(plan.loads) for plan in simulation.steps(4)] == [1, 0, 1, 0]
    simulation.submit("r", 3, digest="r", adapter_pages=1)
    assert copied(simulation, 1) == ["r"]


def test_a_device_that_copies_within_the_step_is_not_given_more_to_copy_while_it_works() -> None:
    simulation = Simulation(num_pages=40, page_copy_s=0.0)
    in_host(simulation, a=1)
    simulation.submit("r", 3, max_tokens=3)
    assert copied(simulation, 3) == []
    assert copied(simulation, 1) == ["a"]


def test_guesses_that_left_host_memory_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.prefetch._MIN_GUESSES", 10)
    simulation = Simulation(num_pages=2)
    simulation.scheduler.prefetcher.forget("nobody")
    simulation.scheduler.prefetcher._num_remembered = 10
    for i in range(100):
        in_host(simulation, **{f"{i}": 5})
        simulation.step(loadable={f"{i}"})
    assert len(simulation.scheduler.prefetcher._guesses) <= 12


# --- by hints


def test_a_hinted_adapter_comes_before_better_guesses_and_takes_an_idle_ones_place() -> None:
    simulation = Simulation(num_pages=6, num_slots=2)
    for i, digest in enumerate("aabbb"):
        simulation.submit(f"r{i}", 2, digest=digest, adapter_pages=2)
        simulation.run_to_end()
    in_host(simulation, guess=1)
    simulation.scheduler.prefetcher.hint("hinted", 2, simulation.now)
    assert copied(simulation, 1) == ["hinted"]
    assert simulation.resident() == {"b", "hinted"}
    simulation.submit("r", 2, digest="hinted", adapter_pages=2)
    assert simulation.step().loads == ()
    assert counts(simulation, Reason.HINT) == (1, 1)


def test_a_hint_takes_nothing_that_a_waiting_request_needs() -> None:
    simulation = Simulation(num_pages=20, num_slots=1, max_num_seqs=1, page_copy_s=1e-3)
    simulation.submit("once", 2, digest="a")
    simulation.run_to_end()
    simulation.submit("runs", 2, max_tokens=4)
    simulation.step()
    simulation.submit("waits for a seat", 2, digest="a")
    simulation.scheduler.prefetcher.hint("b", 1, simulation.now)
    assert copied(simulation, 3) == []
    assert simulation.resident() == {"a"}


def test_a_hint_is_forgotten_when_its_request_comes_or_after_a_while() -> None:
    simulation = Simulation(num_pages=10, num_slots=1)
    simulation.submit("runs", 2, max_tokens=20, digest="a")
    simulation.step()
    for digest in "bc":
        simulation.scheduler.prefetcher.hint(digest, 1, simulation.now)
    simulation.submit("comes", 2, digest="c")
    simulation.now += HINT_S
    simulation.abort("runs")
    simulation.abort("comes")
    assert copied(simulation, 3) == []
    simulation.scheduler.prefetcher.hint("b", 1, simulation.now)
    assert copied(simulation, 1) == ["b"]


def test_a_hint_keeps_a_resident_guess_from_being_the_first_to_go() -> None:
    simulation = Simulation(num_pages=7, prefix_cache=False, num_slots=3)
    in_host(simulation, a=2, b=2)
    simulation.steps(2)
    simulation.scheduler.prefetcher.hint("a", 2, simulation.now)
    simulation.scheduler.check_invariants()
    simulation.submit("large", 3 * PAGE_TOKENS)
    assert [e.digest for e in simulation.step().evictions] == ["b"]


# --- through the core


def resident(harness: Harness) -> set[str]:
    return {adapter.digest for adapter in harness.core.memory.residency}


def read(harness: Harness, ref: AdapterRef, number: int, num_pages: int = 2) -> None:
    """Nobody asks for it, and nobody is about to."""
    harness.core.load_adapter(f"read {ref.name}", ref)
    harness.loaded(ref, image(number, num_pages))


def test_an_idle_engine_copies_what_it_has_read_and_then_rests() -> None:
    harness = Harness()
    is_idle = [harness.core.is_idle]
    read(harness, A, 1)
    is_idle.append(harness.core.is_idle)
    harness.run()
    assert [*is_idle, harness.core.is_idle] == [True, False, True]
    assert resident(harness) == {"digest-1"}
    harness.add("r", A)
    harness.run()
    assert harness.core.stats.adapters["a"].hbm_hits == 1


def test_without_prefetch_only_what_was_hinted_is_copied() -> None:
    harness = Harness(prefetch=False)
    read(harness, A, 1)
    assert harness.core.is_idle
    harness.core.prefetch(A)
    harness.run()
    assert resident(harness) == {"digest-1"}


def test_a_hinted_adapter_that_must_be_read_is_copied_as_soon_as_it_was() -> None:
    harness = Harness(prefetch=False)
    harness.core.prefetch(A)
    harness.loaded(A, image(1))
    harness.run()
    assert resident(harness) == {"digest-1"}
    assert harness.core.scheduler.prefetcher.to_dict()["hint"] == {"copied": 1, "used": 0}


def test_an_unloaded_adapter_is_not_copied_again() -> None:
    harness = Harness()
    read(harness, A, 1)
    harness.run()
    harness.core.prefetch(A)
    harness.core.unload_adapter("unload", "a")
    harness.run()
    assert harness.core.is_idle
    assert resident(harness) == set()


def test_pinned_adapters_come_first() -> None:
    harness = Harness(num_pages=9, max_adapters=3)
    harness.add("runs", length=5, max_tokens=20)
    harness.step()
    for ref, number, num_pages in ((A, 1, 6), (B, 2, 2)):
        read(harness, ref, number, num_pages)
    harness.core.abort("runs")
    harness.core.pin_adapter("pin", "a")
    harness.run()
    assert resident(harness) == {"digest-1", "digest-2"}
