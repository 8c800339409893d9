"""The table against a naive copy of what it should know, over random histories."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from router.fleet_table import ANSWER_S, HBM, HOST, LOADING, FleetTable, Report, hash64, mix

MEMORY_S = 3.0


def table(*names: str, seats: int = 4) -> FleetTable:
    fleet = FleetTable(MEMORY_S)
    for name in names:
        fleet.add(name, seats, 2 * seats)
    return fleet


def names(*adapters: str) -> frozenset[str]:
    return frozenset(adapters)


def test_an_adapter_is_found_in_the_tier_that_was_reported() -> None:
    fleet = table("a", "b")
    fleet.tell("a", Report(resident=names("x"), loading=names("y"), host=names("z")), 0.0)
    a = fleet["a"]
    assert [a.tier(n, 0.0) for n in ("x", "y", "z", "w")] == [HBM, LOADING, HOST, None]
    assert list(fleet.holders("x")) == [a]
    fleet.tell("a", Report(), 1.0)
    assert not fleet.holders("x")


def test_a_placement_is_loading_until_it_is_reported_or_forgotten() -> None:
    fleet = table("a")
    a = fleet["a"]
    fleet.tell("a", Report(free_slots=2, idle_slots=2), 0.0)
    fleet.place(a, "x", 0.0)
    assert a.tier("x", 1.0) == LOADING
    assert a.tier("x", MEMORY_S) is None
    fleet.place(a, "y", 1.0)
    assert not fleet.has_free_slot(a, 1.0)  # two are on their way
    assert fleet.has_free_slot(a, 3.5)  # one was forgotten
    fleet.tell("a", Report(resident=names("y"), free_slots=1), 3.6)
    assert fleet.has_free_slot(a, 3.6)  # the report has counted it
    fleet.place(a, "y", 3.7)
    assert not a.placed
    fleet.check_invariants()


def test_load_is_what_was_heard_and_what_was_sent_since() -> None:
    fleet = table("a")
    a = fleet["a"]
    fleet.sent("a")
    fleet.tell("a", Report(num_requests=3), 0.0)
    assert a.load == 3
    fleet.sent("a")
    fleet.sent("a")
    assert (a.load, a.has_seat) == (5, False)
    fleet.answered("a", 8, 0.1)
    assert (a.load, fleet.num_free) == (8, 0)
    for _ in range(3):
        fleet.sent("a", -1)
    assert (a.load, fleet.num_free) == (5, a.capacity - 5)


def test_own_requests_count_whatever_an_old_report_says() -> None:
    fleet = table("a")
    for _ in range(3):
        fleet.sent("a")
    fleet.tell("a", Report(num_requests=0), 0.0)
    assert fleet["a"].load == 3


def test_an_answer_is_believed_for_a_while_then_the_report_again() -> None:
    """Others' requests may have come and gone between two equal reports: nobody would ever say so."""
    fleet = table("a")
    fleet.tell("a", Report(num_requests=0), 0.0)
    fleet.answered("a", 8, 0.1)
    fleet.settle(0.1 + ANSWER_S / 2)
    assert fleet["a"].load == 8
    fleet.settle(0.2 + ANSWER_S)
    assert fleet["a"].load == 0


def test_a_replica_that_is_gone_is_heard_of_no_more() -> None:
    fleet = table("a", "b")
    a = fleet["a"]
    fleet.answered("a", 8, 0.0)
    fleet.place(a, "x", 0.0)
    fleet.remove("a")
    fleet.sent("a", -1)
    fleet.answered("a", 3, 0.1)
    fleet.settle(9.0)
    assert (fleet.num_requests, fleet.num_free, fleet.num_seats) == (0, fleet["b"].capacity, 4)
    assert not fleet.holders("x")
    fleet.check_invariants()


def test_scores_depend_on_the_adapter_and_the_replica_alone() -> None:
    """Routers agree, and a lost replica moves only its own adapters."""
    fleet = table(*(f"r{i}" for i in range(8)))
    other = table(*(f"r{i}" for i in reversed(range(8))))
    adapters = [f"adapter-{i}" for i in range(400)]

    def homes(fleet: FleetTable) -> dict[str, str]:
        return {n: fleet.replicas[int(fleet.scores(n).argmax())].replica_id for n in adapters}

    before = homes(fleet)
    assert before == homes(other)
    fleet.remove("r0")
    after = homes(fleet)
    assert {n for n in adapters if before[n] != after[n]} == {n for n in adapters if before[n] == "r0"}
    some = fleet.replicas[2:5]
    assert list(fleet.scores("x", some)) == list(fleet.scores("x")[2:5])


def test_homes_are_spread_evenly() -> None:
    fleet = table(*(f"r{i}" for i in range(8)))
    places = [int(fleet.scores(f"adapter-{i}").argmax()) for i in range(4000)]
    counts = [places.count(place) for place in range(8)]
    assert min(counts) > 400
    assert max(counts) < 600


def test_hashes_are_the_same_in_every_process() -> None:
    assert hash64("sql") == 0x39E27B88F4C7FB14
    assert int(mix(np.array([1], np.uint64))[0]) == 0xB456BCFC34C2CB2C


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_its_books_right(seed: int) -> None:
    rng = Random(seed)
    fleet = table("r0", "r1")
    now, born = 0.0, 2
    for _ in range(300):
        now += rng.expovariate(5.0)
        present = [r.replica_id for r in fleet.replicas]
        one = rng.choice(present)
        adapter = f"a{rng.randrange(6)}"
        match rng.randrange(7):
            case 0:
                hbm, loading, host = (
                    names(*(f"a{i}" for i in range(6) if rng.random() < 0.3)) for _ in range(3)
                )
                fleet.tell(one, Report(hbm, loading, host, rng.randrange(9)), now)
            case 1:
                fleet.place(fleet[one], adapter, now)
            case 2:
                fleet.sent(one, rng.choice((1, -1)))
            case 3:
                fleet.answered(one, rng.randrange(9), now)
            case 4:
                fleet.settle(now)
            case 5 if len(present) < 5:
                fleet.add(f"r{born}", 4, 8)
                born += 1
            case 6 if len(present) > 1:
                fleet.remove(one)
        fleet.check_invariants()
        for r in fleet.replicas:
            reported = fleet.holders(adapter).get(r)
            assert r.tier(adapter, now) == (
                None if reported is None else fleet.tier_of(adapter, r, reported, now)
            )
