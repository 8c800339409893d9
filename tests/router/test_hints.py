"""Who is told that a request is coming: one replica, once, and only of what it has yet to load."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from engine.config import DEFAULT_PARALLEL_LOADS, EngineConfig
from engine.prefetch import HINT_S
from router.fleet_table import Report
from router.hints import MAX_DECISIONS, Hint, Hints, Waiting
from router.policy import ResidencyPolicy, RouteRequest
from tests.router.test_policy import SEATS, policy, report

FULL = 2 * SEATS


def waiting(adapter: str, version: str = "1") -> Waiting:
    return Waiting(RouteRequest(adapter), {"name": adapter, "uri": "x", "version": version})


def told(hints: list[Hint]) -> list[tuple[str, str]]:
    return [(hint.replica_id, hint.ref["name"]) for hint in hints]


def full_fleet(count: int) -> ResidencyPolicy:
    return policy(**{f"r{i}": report(load=FULL) for i in range(count)})


def test_the_replica_that_is_told_is_the_one_that_the_request_goes_to() -> None:
    fleet = full_fleet(3)
    ((replica_id, name),) = told(Hints(fleet).due([waiting("sql")], 0.0))
    assert name == "sql"
    for replica in fleet.table.replicas:  # now every home has a seat
        fleet.table.tell(replica.replica_id, report(load=SEATS - 1), 0.5)
    choice = fleet.choose(RouteRequest("sql"), 1.0)
    assert (choice.order[0], choice.reason) == (replica_id, "loading")


@pytest.mark.parametrize(
    "warm", [report(load=FULL, resident="sql"), report(load=FULL, loading="sql")], ids=["resident", "loading"]
)
def test_what_is_there_or_on_its_way_needs_no_hint(warm: Report) -> None:
    fleet = policy(warm=warm, other=report(load=FULL))
    hints = Hints(fleet)
    assert hints.due([waiting("sql")], 0.0) == []


def test_what_is_in_host_memory_is_to_be_copied_there() -> None:
    fleet = policy(other=report(load=FULL), warm=report(load=FULL, host="sql"))
    assert told(Hints(fleet).due([waiting("sql")], 0.0)) == [("warm", "sql")]


def test_a_burst_is_told_once_and_to_one_replica() -> None:
    fleet = full_fleet(4)
    hints = Hints(fleet)
    burst = [waiting("sql")] * 5
    assert len(hints.due(burst, 0.0) + hints.due(burst, HINT_S / 2)) == 1
    choice = fleet.choose(RouteRequest("sql"), HINT_S / 2)
    assert hints.chosen(waiting("sql"), choice, HINT_S / 2) == []


def test_another_version_is_another_adapter() -> None:
    fleet = full_fleet(1)
    assert len(Hints(fleet).due([waiting("sql", "1"), waiting("sql", "2")], 0.0)) == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_long_load_is_told_again_to_the_same_replica(seed: int) -> None:
    """Nothing is reported of a first load, and what the router remembers of placements is as old."""
    fleet = full_fleet(8)
    hints = Hints(fleet)
    ((first, _),) = told(hints.due([waiting("sql")], 0.0))
    rng, now = Random(seed), 0.0
    for _ in range(5):
        for replica in fleet.table.replicas:
            fleet.table.tell(replica.replica_id, report(load=FULL + rng.randrange(3)), now)
        now += HINT_S
        assert told(hints.due([waiting("sql")], now)) == [(first, "sql")]


def test_once_it_is_there_nobody_is_told_again() -> None:
    fleet = full_fleet(2)
    hints = Hints(fleet)
    ((first, _),) = told(hints.due([waiting("sql")], 0.0))
    fleet.table.tell(first, report(load=FULL, resident="sql"), 1.0)
    assert hints.due([waiting("sql")], HINT_S) == []


def test_a_replica_that_is_gone_is_not_told() -> None:
    """It stops, or has died: the router's table has it no longer."""
    fleet = full_fleet(2)
    hints = Hints(fleet)
    ((first, _),) = told(hints.due([waiting("sql")], 0.0))
    fleet.table.remove(first)
    ((second, _),) = told(hints.due([waiting("sql")], HINT_S))
    assert second != first
    fleet.table.remove(second)
    assert hints.due([waiting("sql"), waiting("other")], 2 * HINT_S) == []


def test_nothing_is_remembered_of_replicas_that_are_gone() -> None:
    fleet = full_fleet(0)
    hints = Hints(fleet)
    for number in range(100):
        name = f"r{number}"
        fleet.table.add(name, SEATS, FULL)
        fleet.table.tell(name, report(load=FULL), number)
        assert told(hints.due([waiting(f"a{number}")], number)) == [(name, f"a{number}")]
        fleet.table.remove(name)
    assert len(hints._told) <= HINT_S + 1


def test_a_replica_is_told_of_so_many_at_most_and_of_more_when_they_are_there() -> None:
    """Loads far ahead would push out what those in front need."""
    fleet = full_fleet(1)
    hints = Hints(fleet)
    many = [waiting(f"a{i}") for i in range(3 * DEFAULT_PARALLEL_LOADS)]
    assert [hint.ref for hint in hints.due(many, 0.0)] == [one.ref for one in many[:DEFAULT_PARALLEL_LOADS]]
    assert hints.due(many, 1.0) == []
    fleet.table.tell("r0", report(load=FULL, host="a1"), 1.0)
    assert told(hints.due(many, 1.1)) == [("r0", f"a{DEFAULT_PARALLEL_LOADS}")]
    fleet.table.tell("r0", report(load=FULL), 1.2)
    left = many[DEFAULT_PARALLEL_LOADS + 1 :]
    assert [hint.ref for hint in hints.due(left, HINT_S)] == [
        one.ref for one in left[: DEFAULT_PARALLEL_LOADS - 1]
    ]


def test_a_replica_is_taken_to_load_as_many_at_once_as_it_does_by_default() -> None:
    assert EngineConfig(model="m").max_parallel_loads == DEFAULT_PARALLEL_LOADS


def test_a_replica_that_loads_for_requests_of_its_own_is_told_nothing() -> None:
    fleet = full_fleet(1)
    busy = replace(report(load=FULL), loading=frozenset(f"b{i}" for i in range(DEFAULT_PARALLEL_LOADS)))
    fleet.table.tell("r0", busy, 0.0)
    hints = Hints(fleet)
    assert hints.due([waiting("sql")], 0.0) == []
    fleet.table.tell("r0", replace(busy, loading=frozenset(["b0"])), 0.1)
    assert told(hints.due([waiting("sql")], 0.1)) == [("r0", "sql")]


def test_a_look_at_who_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = full_fleet(100)
    hints = Hints(fleet)
    decide = fleet.choose
    asked: list[str | None] = []

    def choose(request: RouteRequest, now: float) -> object:
        asked.append(request.adapter)
        return decide(request, now)

    monkeypatch.setattr(fleet, "choose", choose)
    many = [waiting(f"a{i}") for i in range(2 * MAX_DECISIONS)]
    assert hints.num_ahead == 100 * DEFAULT_PARALLEL_LOADS
    hints.due(many, 0.0)
    assert len(asked) == MAX_DECISIONS
    hints.due(many, 0.05)  # the next look goes on where this one stopped
    assert asked == [one.request.adapter for one in many]


def test_who_was_let_in_and_waits_for_a_full_replica_has_it_told() -> None:
    """Others have places, but its adapter is in host memory there, and nowhere else."""
    fleet = policy(other=report(load=SEATS), warm=report(load=FULL, host="sql"))
    hints = Hints(fleet)
    choice = fleet.choose(RouteRequest("sql"), 0.0)
    assert told(hints.chosen(waiting("sql"), choice, 0.0)) == [("warm", "sql")]
    assert hints.chosen(waiting("sql"), choice, 0.1) == []


def test_nothing_is_remembered_of_who_waits_no_longer() -> None:
    fleet = full_fleet(2)
    hints = Hints(fleet)
    for second in range(100):
        hints.due([waiting(f"a{second}")], float(second))
    assert len(hints._looks) <= 2 * HINT_S + 1
    assert sum(map(len, hints._told.values())) <= 2 * HINT_S + 1
