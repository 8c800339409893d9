"""The policy against random routing, on a small simulated fleet with stale reports and LRU slots."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from router.policy import ReplicaSnapshot, ResidencyPolicy

SERVICE_S, LOAD_S, REPORT_S, UNUSED_S = 1.0, 0.5, 0.2, 10.0
SEATS, SLOTS = 8, 8
Route = Callable[[str, list["Replica"], float], str]


@dataclass
class Replica:
    name: str
    resident: dict[str, float] = field(default_factory=dict)  # -> last use
    ready_at: dict[str, float] = field(default_factory=dict)
    in_flight: list[str] = field(default_factory=list)
    seats: list[float] = field(default_factory=lambda: [0.0] * SEATS)  # free from then on
    report: ReplicaSnapshot | None = None
    loads: int = 0

    def take(self, adapter: str, now: float) -> float:
        """When the request ends."""
        if adapter not in self.resident:
            self.loads += 1
            idle = [a for a in self.resident if a not in self.in_flight]
            if len(self.resident) >= SLOTS and idle:
                del self.resident[min(idle, key=lambda a: self.resident[a])]
            self.ready_at[adapter] = now + LOAD_S
        self.resident[adapter] = now
        self.in_flight.append(adapter)
        start = max(now, self.ready_at[adapter], heapq.heappop(self.seats))
        heapq.heappush(self.seats, start + SERVICE_S)
        return start + SERVICE_S

    def snapshot(self, now: float) -> ReplicaSnapshot:
        loading = frozenset(a for a in self.resident if self.ready_at[a] > now)
        unused = sum(a not in self.in_flight and now - used > UNUSED_S for a, used in self.resident.items())
        return ReplicaSnapshot(
            replica_id=self.name,
            resident=frozenset(self.resident) - loading,
            host=frozenset(),
            loading=loading,
            num_running=min(SEATS, len(self.in_flight)),
            num_waiting=max(0, len(self.in_flight) - SEATS),
            free_slots=SLOTS - len(self.resident) + unused,
            max_num_seqs=SEATS,
        )


@dataclass(frozen=True)
class Result:
    loads: int
    p99_s: float
    placed: list[str]  # replica of each request, in order


def simulate(names: list[str], rate: float, route: Route, num_replicas: int = 2, seed: int = 0) -> Result:
    """One request for each name, Poisson arrivals at `rate` a second."""
    rng = Random(seed)
    replicas = [Replica(f"r{i}") for i in range(num_replicas)]
    by_name = {r.name: r for r in replicas}
    ends: list[tuple[float, int, Replica, str]] = []
    order = itertools.count()
    now, reported, times, placed = 0.0, -1.0, [], []
    for adapter in names:
        now += rng.expovariate(rate)
        while ends and ends[0][0] <= now:
            _, _, replica, ended = heapq.heappop(ends)
            replica.in_flight.remove(ended)
        if now - reported >= REPORT_S:
            reported = now
            for replica in replicas:
                replica.report = replica.snapshot(now)
        chosen = by_name[route(adapter, replicas, now)]
        placed.append(chosen.name)
        end = chosen.take(adapter, now)
        times.append(end - now)
        heapq.heappush(ends, (end, next(order), chosen, adapter))
    return Result(sum(r.loads for r in replicas), sorted(times)[int(0.99 * len(times))], placed)


def by_policy() -> Route:
    policy = ResidencyPolicy(Random(0))

    def route(adapter: str, replicas: list[Replica], now: float) -> str:
        seen = []
        for replica in replicas:
            assert replica.report is not None
            fields = {f: getattr(replica.report, f) for f in ReplicaSnapshot.__slots__}
            seen.append(ReplicaSnapshot(**{**fields, "queue_len": len(replica.in_flight)}))
        chosen = policy.choose(adapter, seen, now).order[0]
        policy.routed(adapter, chosen, now)
        return chosen

    return route


def at_random() -> Route:
    rng = Random(0)
    return lambda adapter, replicas, now: rng.choice(replicas).name


def zipf(num_adapters: int, count: int, seed: int) -> list[str]:
    weights = [1 / (i + 1) for i in range(num_adapters)]
    return Random(seed).choices([f"a{i}" for i in range(num_adapters)], weights, k=count)


@pytest.mark.parametrize("seed", range(5))
def test_under_zipf_there_are_far_fewer_loads_than_at_random(seed: int) -> None:
    """FR-60: 30 adapters on 2 x 8 slots; at least 30 % fewer loads at an equal or better p99."""
    names = zipf(30, 2000, seed)
    ours, random = (simulate(names, rate=9.0, route=route, seed=seed) for route in (by_policy(), at_random()))
    assert ours.loads <= 0.7 * random.loads
    assert ours.p99_s <= random.p99_s


@pytest.mark.parametrize("seed", range(5))
def test_when_everything_fits_each_adapter_is_loaded_about_once(seed: int) -> None:
    names = Random(seed).choices([f"a{i}" for i in range(12)], k=2000)
    assert simulate(names, rate=5.0, route=by_policy(), seed=seed).loads <= 1.5 * 12


@pytest.mark.parametrize("seed", range(5))
def test_one_hot_adapter_uses_the_whole_fleet_and_loads_once_a_replica(seed: int) -> None:
    """FR-60: at three times one replica's capacity both replicas work, within 10 s."""
    result = simulate(["hot"] * 600, rate=3 * SEATS / SERVICE_S, route=by_policy(), num_replicas=4, seed=seed)
    assert result.loads <= 4
    first_ten_seconds = result.placed[: int(10 * 3 * SEATS / SERVICE_S)]
    assert len(set(first_ten_seconds)) >= 3


@pytest.mark.parametrize("seed", range(5))
def test_a_hot_adapter_that_cools_down_shrinks_back_to_one_replica(seed: int) -> None:
    """FR-60."""
    policy = by_policy()
    hot = simulate(["hot"] * 300, rate=2 * SEATS / SERVICE_S, route=policy, seed=seed)
    assert len(set(hot.placed)) == 2
    calm = simulate(["hot"] * 100, rate=0.25 * SEATS / SERVICE_S, route=policy, seed=seed)
    assert len(set(calm.placed)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_an_overload_of_cold_adapters_makes_no_load_storm(seed: int) -> None:
    """Cold loads make queues; if queues made spills and spills made loads, this would explode."""
    names = Random(seed).choices([f"a{i}" for i in range(60)], k=1500)
    ours, random = (
        simulate(names, rate=20.0, route=route, seed=seed) for route in (by_policy(), at_random())
    )
    assert ours.loads <= random.loads
