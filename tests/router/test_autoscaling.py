"""How many replicas: by seats, pages, time and adapters; slow to go down, and nothing hot is lost by it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from router.autoscaling import (
    HANDOVER_S,
    LOW,
    QUEUE_S,
    TARGET,
    Autoscaler,
    Bounds,
    Handover,
    ReplicaLoad,
    fleet_need,
    missing_copies,
)
from router.fleet_table import FleetTable

BOUNDS = Bounds(least=1, most=8, up_after_s=10.0, down_after_s=60.0)


def load(replica_id: str = "r0", **values: Any) -> ReplicaLoad:
    return ReplicaLoad(replica_id, **{"seats": 10, "slots": 4, "num_pages": 100, "page_tokens": 16, **values})


def loads(count: int, **values: Any) -> list[ReplicaLoad]:
    return [load(f"r{i}", **values) for i in range(count)]


class Fleet:
    """Looked at once a second; has at once what it is told to have."""

    def __init__(self, count: int, bounds: Bounds = BOUNDS) -> None:
        self.scaler = Autoscaler(bounds)
        self.count = count
        self.now = 0.0

    def run(self, seconds: int, need: float) -> list[int]:
        """`need`: of the whole fleet, in replicas, by pages. How many replicas there were."""
        counts = []
        for _ in range(seconds):
            pages = round(100 * need / self.count) if self.count else 0
            wanted = self.scaler.plan(loads(self.count, used_pages=pages), self.now).num_replicas
            self.count = self.count if wanted is None else wanted
            self.now += 1.0
            counts.append(self.count)
        return counts


@pytest.mark.parametrize(
    ("values", "need"),
    [
        ({}, 0.0),
        ({"num_requests": 15}, 1.5),
        ({"num_requests": 2, "used_pages": 60}, 0.6),
        ({"num_requests": 2, "used_pages": 60, "queued_tokens": 320}, 0.8),
        # one long prompt is as much as a full batch
        ({"num_requests": 1, "queued_tokens": 1500, "prefill_s": 2e-3}, 3.0 / QUEUE_S),
    ],
)
def test_a_replicas_need_is_what_it_has_least_of(values: dict[str, Any], need: float) -> None:
    assert load(**values).need == pytest.approx(need)


def test_adapters_in_use_need_slots_and_copies_do_not_count_twice() -> None:
    names = frozenset("abcdef")
    assert fleet_need(loads(2, in_use=names)) == 6 / 4
    assert fleet_need([load(in_use=names), load(in_use=frozenset("ghijkl"))]) == 12 / 4


def test_a_burst_must_last_and_then_gets_what_it_needs_at_once() -> None:
    fleet = Fleet(1)
    assert set(fleet.run(10, need=2.6)) == {1}
    assert fleet.run(1, need=2.6) == [4]
    assert set(fleet.run(100, need=2.6)) == {4}
    assert 2.6 / TARGET <= 4


def test_a_short_burst_and_a_short_pause_change_nothing() -> None:
    fleet = Fleet(2)
    for _ in range(20):
        assert set(fleet.run(9, need=3.0) + fleet.run(1, need=1.4)) == {2}
    for _ in range(20):
        assert set(fleet.run(59, need=0.0) + fleet.run(1, need=1.4)) == {2}


def test_starting_replicas_are_not_called_off_by_their_own_effect() -> None:
    """Of four that were asked for three are there; enough not to ask again, but none to cancel."""
    scaler = Autoscaler(BOUNDS)
    for now in range(11):
        plan = scaler.plan(loads(1, num_requests=26), float(now))
    assert plan.num_replicas == 4
    assert scaler.plan(loads(3, num_requests=7), 12.0).num_replicas == 4


def test_what_never_came_is_called_off_when_it_is_needed_no_more() -> None:
    """The cluster has room for two of seven: an idle fleet must not ask for seven for ever."""
    scaler = Autoscaler(BOUNDS)
    for now in range(11):
        plan = scaler.plan(loads(1, num_requests=40), float(now))
    assert plan.num_replicas == 7
    counts = [scaler.plan(loads(2), float(now)).num_replicas for now in range(11, 90)]
    assert counts[:60] == [7] * 60
    # nobody has gone while there are two
    assert counts[60:66] == [6, 5, 4, 3, 2, 1]
    assert set(counts[66:]) == {1}


def test_who_starts_is_not_called_off_by_who_was_faster() -> None:
    """Of a fleet that begins with several, or is replaced by new ones, the first that serve are not all."""
    scaler = Autoscaler(BOUNDS)
    counts = [scaler.plan(loads(there, num_requests=1), 10.0 * there).num_replicas for there in range(5)]
    assert counts == [None] * 5


def test_idle_replicas_go_one_by_one_and_only_when_the_last_has_gone() -> None:
    fleet = Fleet(4)
    counts = fleet.run(70, need=0.3)
    assert counts[:60] == [4] * 60
    assert counts[60:64] == [3, 2, 1, 1]
    scaler = Autoscaler(BOUNDS)
    plans = [scaler.plan(loads(4), float(now)) for now in range(100)]
    assert {plan.num_replicas for plan in plans[61:]} == {3}


def test_a_fleet_that_would_be_loaded_with_one_less_stays() -> None:
    assert set(Fleet(3).run(300, need=2 * LOW + 0.1)) == {3}


@pytest.mark.parametrize(("least", "last"), [(0, 0), (1, 1), (3, 3)])
def test_it_stays_within_its_bounds(least: int, last: int) -> None:
    fleet = Fleet(3, Bounds(least, 4, up_after_s=0.0, down_after_s=5.0))
    assert fleet.run(1, need=50.0) == [4]
    assert fleet.run(60, need=0.0)[-1] == last


def test_the_last_one_goes_only_when_nobody_has_asked_for_anything() -> None:
    bounds = Bounds(0, 4, up_after_s=0.0, down_after_s=5.0)
    assert Fleet(1, bounds).run(100, need=0.01)[-1] == 1
    fleet = Fleet(1, bounds)
    assert fleet.run(6, need=0.0) == [1] * 5 + [0]
    # Serve starts one when a request comes, seen empty or not: that is where it begins again
    fleet.count = 1
    assert set(fleet.run(20, need=0.5)) == {1}
    assert set(fleet.run(6, need=0.0) + fleet.run(3, need=0.0)) == {0, 1}
    fleet.count = 1
    assert fleet.run(6, need=0.0) == [1] * 5 + [0]


def test_nobody_goes_before_hot_adapters_are_on_two() -> None:
    scaler = Autoscaler(Bounds(1, 4, up_after_s=0.0, down_after_s=0.0))
    sole = [load("r0", holds=frozenset("ab"), wanted=frozenset("a")), load("r1", holds=frozenset("c"))]
    plan = scaler.plan(sole, 0.0)
    assert (plan.num_replicas, plan.handovers) == (None, (Handover("a", "r1"),))
    both = [sole[0], load("r1", holds=frozenset("ac"))]
    assert scaler.plan(both, 1.0) == scaler.plan(loads(1), 2.0)
    assert scaler.plan(loads(1), 3.0).num_replicas == 1


def test_a_handover_that_never_comes_is_waited_for_in_vain_only_so_long() -> None:
    scaler = Autoscaler(Bounds(1, 4, up_after_s=0.0, down_after_s=0.0))
    sole = [load("r0", holds=frozenset("a"), wanted=frozenset("a")), load("r1")]
    counts = [scaler.plan(sole, float(now)).num_replicas for now in range(int(HANDOVER_S) + 1)]
    assert counts == [None] * int(HANDOVER_S) + [1]


def test_what_nobody_holds_or_wants_is_not_handed_over() -> None:
    assert missing_copies([load("r0", wanted=frozenset("a"), holds=frozenset("b")), load("r1")]) == ()
    assert missing_copies([load("r0", wanted=frozenset("a"), holds=frozenset("a"))]) == ()


def test_whoever_goes_the_router_finds_the_adapter_at_home() -> None:
    """Against the router's own table, for random fleets: the copy is the first home among those that stay."""
    rng = Random(0)
    for _ in range(50):
        ids = [f"r{rng.randrange(10**6)}" for _ in range(rng.randint(2, 6))]
        names = [f"a{i}" for i in range(5)]
        holder = {name: rng.choice(ids) for name in names}
        fleet = [
            load(
                i,
                holds=frozenset(name for name in names if holder[name] == i),
                wanted=frozenset(rng.sample(names, 3)),
            )
            for i in dict.fromkeys(ids)
        ]
        wanted = {name for one in fleet for name in one.wanted}
        handed = {h.adapter: h.to for h in missing_copies(fleet)}
        assert handed.keys() == (wanted if len(fleet) > 1 else set())
        for name, to in handed.items():
            table = FleetTable(memory_s=1.0)
            for one in fleet:
                if one.replica_id != holder[name]:
                    table.add(one.replica_id, 1, 1)
            assert table.replicas[int(np.argmax(table.scores(name)))].replica_id == to
