"""What a request finds and takes when it starts, seen through the scheduler that starts it."""

from __future__ import annotations

import pytest

from engine.memory import EvictionCause
from tests.engine.simulation import Simulation

# --- prefix cache


def num_cached(simulation: Simulation, request_id: str) -> int | None:
    simulation.step()
    return simulation.scheduler.sequences[request_id].num_cached


@pytest.mark.parametrize(("num_tokens", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_full_pages_of_a_prompt_are_found_but_never_the_whole_prompt(num_tokens: int, expected: int) -> None:
    simulation = Simulation(num_pages=20)
    prompt = tuple(range(12))
    simulation.submit("first", prompt)
    simulation.run_to_end()
    simulation.submit("again", prompt[:num_tokens], max_tokens=2)
    assert num_cached(simulation, "again") == expected
    simulation.run_to_end()
    simulation.check_ends()


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat() -> None:
    simulation = Simulation(num_pages=20)
    simulation.submit("turn 1", (1, 2, 3, 4, 5), max_tokens=8)
    simulation.run_to_end()
    simulation.submit("turn 2", (*simulation.clients["turn 1"].tokens, 7), max_tokens=2)
    assert num_cached(simulation, "turn 2") == 12


def test_requests_side_by_side_share_the_pages_of_one_prompt() -> None:
    simulation = Simulation(num_pages=20)
    for name in "ab":
        simulation.submit(name, tuple(range(9)), max_tokens=4)
    simulation.step()
    a, b = simulation.scheduler.running
    assert a.page_ids[:2] == b.page_ids[:2]
    assert set(a.own_page_ids).isdisjoint(b.own_page_ids)
    simulation.run_to_end()
    simulation.check_ends()


def test_pages_that_are_found_are_not_taken_once_more() -> None:
    simulation = Simulation(num_pages=4)
    for name in "ab":  # 3 pages each, 2 of which are the same
        simulation.submit(name, tuple(range(9)), max_tokens=3)
        simulation.step()
    assert simulation.running() == {"a", "b"}
    simulation.run_to_end()
    simulation.check_ends()


def test_the_same_tokens_under_another_digest_never_match() -> None:
    """FR-22: KV of the weights before a reload is not found; after a reload of the same bytes it is."""
    simulation = Simulation(num_pages=40, num_slots=4)
    prompt = tuple(range(9))
    for i, (digest, expected) in enumerate(
        [("a@v1", 0), ("a@v1", 8), ("a@v2", 0), (None, 0), ("a@v1", 8), ("a@v2", 8), (None, 8)]
    ):
        simulation.submit(f"{i}", prompt, max_tokens=2, digest=digest)
        assert num_cached(simulation, f"{i}") == expected
        simulation.run_to_end()
    simulation.check_ends()


def test_without_the_prefix_cache_nothing_is_shared_or_kept() -> None:
    simulation = Simulation(num_pages=20, prefix_cache=False)
    for name in "ab":
        simulation.submit(name, tuple(range(9)), max_tokens=2)
        assert num_cached(simulation, name) == 0
        simulation.run_to_end()
    assert simulation.memory.pool.num_free == 20


def test_idle_adapters_and_cached_prefixes_make_room_before_anyone_is_refused() -> None:
    """FR-36: the whole pool is full of what nobody uses."""
    simulation = Simulation(num_pages=12, num_slots=2)
    simulation.submit("fills", 8, digest="a", adapter_pages=6)
    simulation.run_to_end()
    simulation.submit("fills too", 8)
    simulation.run_to_end()
    assert simulation.memory.pool.num_free == 2
    simulation.submit("large", 47, max_tokens=1)
    plan = simulation.step()
    assert plan.admitted == ("large",)
    assert [e.digest for e in plan.evictions] == ["a"]


# --- waiting for adapters


def test_a_fifth_adapter_waits_and_everyone_behind_it_runs() -> None:
    """FR-31: 4 slots, the row's queue."""
    simulation = Simulation(num_pages=100, num_slots=4, max_num_seqs=16)
    queue = [None, None, "L1", "L3", "L2", "L4", "L5", "L5", None, "L1"]
    for i, digest in enumerate(queue):
        simulation.submit(f"{i}", 3, max_tokens=4, digest=digest)
    plan = simulation.step()
    assert plan.admitted == tuple(f"{i}" for i, digest in enumerate(queue) if digest != "L5")
    simulation.run_to_end()
    simulation.check_ends()


def test_an_adapter_that_is_not_in_host_memory_is_asked_for_and_blocks_nobody() -> None:
    simulation = Simulation(num_pages=40, num_slots=2, max_overtakes=0)
    simulation.submit("cold", 3, digest="cold")
    simulation.submit("warm", 3, digest="warm", max_tokens=3)
    simulation.submit("base", 3)
    plan = simulation.step(loadable={"warm"})
    assert plan.admitted == ("warm", "base")
    assert plan.missing == ("cold",)
    # what is resident needs no image
    simulation.submit("warm 2", 3, digest="warm")
    assert simulation.step(loadable=()).admitted == ("warm 2",)
    assert simulation.step(loadable={"cold"}).admitted == ("cold",)


def test_an_adapter_in_use_keeps_its_slot_and_pages_while_others_want_them() -> None:
    """FR-24: 2 slots; the simulated pages fail the test if a running request's weights are overwritten."""
    simulation = Simulation(num_pages=60, num_slots=2)
    for digest in ("A1", "A2"):
        simulation.submit(digest, 3, max_tokens=50, digest=digest)
    simulation.step()
    for digest in ("A3", "A4"):
        simulation.submit(digest, 3, digest=digest)
    simulation.steps(48)
    assert simulation.resident() == {"A1", "A2"}
    simulation.run_to_end()
    simulation.check_ends()


def test_adapters_of_any_size_may_follow_each_other_in_one_slot() -> None:
    """FR-25: X, Y, X, Y; a page that kept an older adapter's bytes fails the simulated page check."""
    simulation = Simulation(num_pages=10, num_slots=1)
    for i, digest in enumerate(("X", "Y", "X", "Y")):
        simulation.submit(f"{i}", 5, digest=digest, adapter_pages={"X": 5, "Y": 2}[digest])
        simulation.run_to_end()
    simulation.check_ends()


def test_a_slot_is_taken_from_the_adapter_that_nobody_waits_for() -> None:
    """The least recently used one has a queued request, so that another one goes."""
    simulation = Simulation(num_pages=40, num_slots=2, max_num_batched_tokens=8)
    for digest in ("queued", "unused"):
        simulation.submit(f"loads {digest}", 3, digest=digest)
        simulation.run_to_end()
    simulation.submit("new", 8, digest="new")
    simulation.submit("waits", 3, digest="queued")
    plan = simulation.step()
    assert plan.admitted == ("new",)
    assert [(e.digest, e.cause) for e in plan.evictions] == [("unused", EvictionCause.SLOT)]


def test_pages_of_an_adapter_that_an_older_request_waits_for_are_not_taken_for_a_younger_one() -> None:
    simulation = Simulation(num_pages=20, num_slots=1)
    simulation.submit("loads", 3, digest="A", adapter_pages=4)
    simulation.run_to_end()
    simulation.submit("runs", 50, max_tokens=6)
    simulation.step()
    simulation.submit("old", 28, digest="A", adapter_pages=4)  # lacks pages
    simulation.submit("young", 12)  # would fit in A's place
    assert simulation.step().admitted == ()
    simulation.run_to_end()
    simulation.check_ends()


def test_a_growing_request_takes_pages_from_the_adapter_that_nobody_waits_for() -> None:
    simulation = Simulation(num_pages=8, num_slots=3, max_num_seqs=1, prefix_cache=False)
    for digest in ("queued", "unused"):
        simulation.submit(f"loads {digest}", 3, digest=digest, adapter_pages=2)
        simulation.run_to_end()
    simulation.submit("grows", 14, max_tokens=9)
    simulation.submit("waits", 3, digest="queued", adapter_pages=2)
    plans = simulation.steps(7)
    assert [e.digest for p in plans for e in p.evictions] == ["unused"]


def test_what_an_older_request_waits_for_is_not_evicted_for_a_younger_one() -> None:
    simulation = Simulation(num_pages=20, num_slots=1)
    simulation.submit("loads", 3, digest="A")
    simulation.run_to_end()
    simulation.submit("runs", 50, max_tokens=6)
    simulation.step()
    simulation.submit("old", 28, digest="A")  # lacks pages
    simulation.submit("young", 3, digest="B")  # would fit in A's place
    assert simulation.step().admitted == ()
    assert simulation.resident() == {"A"}
    simulation.run_to_end()
    simulation.check_ends()
