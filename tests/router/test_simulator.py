"""The simulated replica against what can be worked out by hand; the policy against others on small fleets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from engine.step_cost import StepCost
from router.simulator import Failure, Fleet, Objective, Result, Setup, requests_per_s
from router.simulator_replica import ReplicaSpec
from router.simulator_rules import RULES, Ours, Rule
from router.simulator_traffic import Arrival, Lengths, bursty, one_hot, poisson, shifting, zipf

COST = StepCost(base_s=0.02, prefill_s=1e-3, row_s=4e-3, lora_page_s=2e-4)
SPEC = ReplicaSpec(seats=8, slots=8, host_slots=16, cost=COST, adapter_pages=8, load_s=0.5)
SETUP = Setup(num_replicas=1, spec=SPEC, objective=Objective(1.0, 0.15), num_routers=1)
LENGTHS = Lengths(prompt_median=40, output_median=32, sigma=0.5)


def run(arrivals: list[Arrival], setup: Setup = SETUP, rule: str = "lorafleet") -> tuple[Fleet, Result]:
    fleet = Fleet(setup, RULES[rule])
    return fleet, fleet.run(arrivals)


def test_a_cold_request_waits_for_its_load_then_for_its_prompt_then_for_its_steps() -> None:
    fleet, _ = run([Arrival(1.0, 7, num_prompt=100, num_output=11), Arrival(30.0, 7, 100, 11)])
    cold, warm = fleet.done
    prefill = 100 * COST.prefill_s + COST.base_s
    step = COST.base_s + COST.row_s + SPEC.adapter_pages * COST.lora_page_s
    assert cold.first_token - cold.arrived == pytest.approx(SPEC.load_s + prefill)
    assert warm.first_token - warm.arrived == pytest.approx(prefill)
    assert warm.ended - warm.first_token == pytest.approx(10 * step)
    assert (cold.is_cold, warm.is_cold) == (True, False)


def test_two_that_decode_share_the_steps() -> None:
    fleet, _ = run([Arrival(1.0, 7, 1, 1000), Arrival(1.0, 7, 1, 1000)])
    step = COST.base_s + 2 * COST.row_s + SPEC.adapter_pages * COST.lora_page_s
    first, second = fleet.done
    assert second.ended - second.first_token == pytest.approx(999 * step, rel=0.01)
    assert first.ended - first.first_token == pytest.approx(999 * step, rel=0.01)


def test_requests_for_one_cold_adapter_share_a_load_and_others_load_beside_it() -> None:
    fleet, result = run([Arrival(1.0, i % 4, 1, 2) for i in range(8)])
    assert result.cold_per_1000 == pytest.approx(1000 * 4 / 8)
    assert (
        max(r.first_token for r in fleet.done) < 1.0 + SPEC.load_s + 8 * (COST.base_s + COST.prefill_s) + 1e-9
    )


def test_more_loads_than_run_at_once_wait_their_turn() -> None:
    fleet, _ = run([Arrival(1.0, i, 1, 1) for i in range(6)])
    waited = sorted(r.first_token - r.arrived for r in fleet.done)
    assert waited[3] < 2 * SPEC.load_s < waited[4]


class Watching(Ours):
    """Fails if a replica is ever in a state that no engine could be in."""

    fleet: Fleet

    def choose(self, request, now):  # type: ignore[no-untyped-def]
        self.table.check_invariants()
        for replica in self.fleet._replicas.values():
            running = [r for r in replica.requests if r not in replica._waiting]
            users = Counter(r.adapter for r in running)
            assert len(running) == replica._num_running <= replica.spec.seats
            assert users == +Counter(replica._users)
            assert len(replica._users) <= replica.spec.slots
            assert len(replica._host) <= replica.spec.host_slots
        return super().choose(request, now)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_once_whatever_fails(seed: int) -> None:
    setup = replace(
        SETUP, num_replicas=4, num_routers=2, failures=(Failure(8.0, (0, 2), 5.0), Failure(20.0, (1,), 5.0))
    )
    arrivals = list(poisson(lambda _: 9.0, 40.0, zipf(60), LENGTHS, seed))
    fleet = Fleet(setup, Watching, seed)
    for rule in fleet._rules:
        assert isinstance(rule, Watching)
        rule.fleet = fleet
    result = fleet.run(arrivals)
    ended = fleet.done + fleet.lost
    assert len({id(request) for request in ended}) == len(ended) == len(arrivals) == result.num_requests
    assert all(r.first_token >= r.arrived for r in fleet.done)
    assert all(r.ended >= r.first_token for r in fleet.done)
    assert 0 < result.num_lost < 3 * SPEC.capacity
    assert all(r.first_token >= 0.0 or r.was_retried for r in fleet.lost)
    assert sum(result.reasons.values()) == len(fleet.done)


def test_the_same_seed_gives_the_same_result() -> None:
    arrivals = list(poisson(lambda _: 5.0, 30.0, zipf(60), LENGTHS, 3))
    assert run(arrivals)[1] == run(arrivals)[1]


@pytest.mark.parametrize("rule", list(RULES))
def test_every_rule_serves_a_calm_fleet(rule: str) -> None:
    setup = replace(SETUP, num_replicas=3, num_routers=2)
    arrivals = list(poisson(lambda _: 3.0, 30.0, zipf(12), LENGTHS, 0))
    _, result = run(arrivals, setup, rule)
    assert result.num_requests == len(arrivals)
    assert result.ttft_p50_s < 0.3


THREE = Setup(num_replicas=3, spec=SPEC, objective=Objective(1.0, 0.15), warm_up_s=20.0)


@pytest.mark.parametrize("seed", range(3))
def test_under_zipf_there_are_far_fewer_loads_at_an_equal_or_better_p99(seed: int) -> None:
    """FR-60: 60 adapters on three replicas; 30 % below random and below stock multiplexing."""
    arrivals = list(poisson(lambda _: 7.0, 220.0, zipf(60), LENGTHS, seed))
    ours, random, multiplexing = (
        Fleet(THREE, RULES[rule]).run(arrivals) for rule in ("lorafleet", "random", "Serve multiplexing")
    )
    for other in random, multiplexing:
        assert ours.cold_per_1000 <= 0.7 * other.cold_per_1000
        assert ours.ttft_p99_s <= other.ttft_p99_s


@pytest.mark.parametrize("seed", range(3))
def test_a_hot_adapter_spreads_within_ten_seconds_and_shrinks_back(seed: int) -> None:
    """FR-60: at three times what one replica serves."""
    capacity = requests_per_s(SPEC, LENGTHS, Ours)

    def rate(now: float) -> float:
        return capacity * (3.0 if 10.0 <= now < 40.0 else 0.1)

    setup = replace(SETUP, num_replicas=4, num_routers=2)
    fleet = Fleet(setup, Ours, seed, watch="a99")
    pick = one_hot(zipf(20), 99, rate, other_rate=0.5)
    result = fleet.run(poisson(lambda now: rate(now) + 0.5, 75.0, pick, LENGTHS, seed))
    copies = dict(result.copies)
    assert min(copies[t] for t in copies if 20.0 < t <= 40.0) >= 3
    assert max(copies[t] for t in copies if 55.0 < t <= 75.0) <= 1


def test_when_everything_fits_each_adapter_is_loaded_about_once() -> None:
    setup = replace(SETUP, num_replicas=2, num_routers=2)
    _, result = run(list(poisson(lambda _: 3.0, 200.0, zipf(12, 0.0), LENGTHS, 0)), setup)
    assert result.cold_per_1000 * result.num_requests / 1000 <= 1.5 * 12


@pytest.mark.parametrize("seed", range(2))
def test_an_overload_of_cold_adapters_makes_no_load_storm(seed: int) -> None:
    """Cold loads make queues; if queues made spills and spills made loads, this would explode."""
    arrivals = list(poisson(lambda _: 12.0, 40.0, zipf(60, 0.0), LENGTHS, seed))
    ours, random = (Fleet(THREE, RULES[rule]).run(arrivals) for rule in ("lorafleet", "random"))
    assert ours.cold_per_1000 <= random.cold_per_1000


def test_traffic_is_what_it_says() -> None:
    pick = zipf(1000)
    counts = Counter(pick(Random(i), 0.0) for i in range(20_000))
    assert counts[0] / counts[9] == pytest.approx(10.0, rel=0.25)
    moved = shifting(700, period_s=10.0)
    assert Counter(moved(Random(i), 25.0) for i in range(999)).most_common(1)[0][0] == 200
    for make in (poisson(lambda _: 50.0, 200.0, pick, LENGTHS, 0), bursty(50.0, 200.0, pick, LENGTHS, 0)):
        arrivals = list(make)
        assert [a.time_s for a in arrivals] == sorted(a.time_s for a in arrivals)
        assert len(arrivals) == pytest.approx(50 * 200, rel=0.1)
    seconds = Counter(int(a.time_s) for a in bursty(50.0, 200.0, pick, LENGTHS, 0))
    mean = sum(seconds.values()) / 200
    variance = sum((seconds[s] - mean) ** 2 for s in range(200)) / 200
    assert variance > 5 * mean


def test_a_rule_must_say_where_requests_go() -> None:
    with pytest.raises(NotImplementedError):
        Rule(Random(0)).choose(None, 0.0)  # type: ignore[arg-type]
