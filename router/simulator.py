"""A fleet in simulated time: the policy that runs in Serve, or another rule, over replicas that cost what the
engine was measured to cost. Discrete events; seeded; one run takes about 0.1 ms a request.

Each ingress has a router of its own. Reports reach all routers every REPORT_S, as old as that; an answer
tells its own router how many requests are on the replica. A replica that is full rejects, and the router
tries the next of its order, then again a little later. A replica that dies takes its streams with it; those
without a first token are sent again, once; it comes back empty.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, pstdev, quantiles

from router.policy import RouteRequest
from router.simulator_replica import ReplicaSpec, Request, SimReplica
from router.simulator_rules import Rule
from router.simulator_traffic import Arrival, Lengths

REPORT_S = 0.2
SAMPLE_S = 2.0
RETRY_S, RETRY_MOST_S = 0.025, 0.5  # as Serve's router backs off


@dataclass(frozen=True, slots=True)
class Failure:
    """These replicas die at a time and are back, empty, after `down_s`."""

    time_s: float
    replicas: tuple[int, ...]
    down_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Objective:
    ttft_s: float
    token_s: float  # mean time between tokens


@dataclass(frozen=True, slots=True)
class Setup:
    num_replicas: int
    spec: ReplicaSpec
    objective: Objective
    num_routers: int = 2
    warm_up_s: float = 0.0  # what arrives before is not measured
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    num_requests: int  # measured
    cold_per_1000: float  # loads from the source
    cold_share: float  # requests that waited for the source
    ttft_p50_s: float
    ttft_p99_s: float
    token_p99_s: float
    imbalance: float  # standard deviation over mean of the output tokens that each replica was asked for
    attainment: float  # share of requests within the objective; lost ones are not
    num_lost: int
    reasons: dict[str, int] = field(default_factory=dict)
    copies: list[tuple[float, int]] = field(
        default_factory=list
    )  # (time, replicas asked for the watched adapter)


def requests_per_s(spec: ReplicaSpec, lengths: Lengths, build_rule: Callable[[Random], Rule]) -> float:
    """What one replica serves at most of requests for one adapter: it has many to do at once."""
    fleet = Fleet(Setup(1, spec, Objective(1.0, 1.0), num_routers=1), build_rule)
    rng = Random(0)
    count = 16 * spec.seats
    fleet.run([Arrival(0.0, 0, *lengths.draw(rng)) for _ in range(count)])
    ends = sorted(request.ended for request in fleet.done)
    return count / 2 / (ends[3 * count // 4] - ends[count // 4])


class Fleet:
    def __init__(
        self, setup: Setup, build_rule: Callable[[Random], Rule], seed: int = 0, watch: str | None = None
    ) -> None:
        """`watch`: an adapter; how many replicas its requests went to is counted every SAMPLE_S."""
        self.setup = setup
        self.done: list[Request] = []
        self.lost: list[Request] = []
        self.loads: list[float] = []  # when each load from the source was counted
        self.copies: list[tuple[float, int]] = []
        self._rng = Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._now = 0.0
        self._watch = watch
        self._watched: set[str] = set()
        self._rules = [build_rule(Random(seed + 1 + i)) for i in range(setup.num_routers)]
        self._replicas: dict[str, SimReplica] = {}
        self._num_born = 0
        self._dead_loads = 0
        self._dead_tokens: list[int] = []
        for _ in range(setup.num_replicas):
            self._add_replica()

    def run(self, arrivals: Iterable[Arrival]) -> Result:
        """Until every request has ended."""
        source = iter(arrivals)
        self._next_arrival(source)
        self._at(REPORT_S, self._report)
        self._at(SAMPLE_S, self._sample)
        self._at(self.setup.warm_up_s, self._begin)
        for failure in self.setup.failures:
            self._at(failure.time_s, lambda now, failure=failure: self._fail(failure, now))  # type: ignore[misc]
        self._num_open = 0
        self._has_arrivals = True
        while self._events and (self._has_arrivals or self._num_open):
            time_s, _, action = heapq.heappop(self._events)
            self._now = max(self._now, time_s)
            action(self._now)
        return self._result()

    def _at(self, time_s: float, action: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, action))

    def _next_arrival(self, source: Iterable[Arrival]) -> None:
        arrival = next(iter(source), None)
        if arrival is None:
            self._has_arrivals = False
            return

        def arrive(now: float) -> None:
            self._num_open += 1
            request = Request(f"a{arrival.adapter}", arrival.num_prompt, arrival.num_output, now)
            request.router = self._rng.randrange(len(self._rules))
            self._rules[request.router].arrived(request.adapter, now)
            self._route(request, now)
            self._next_arrival(source)

        self._at(arrival.time_s, arrive)

    def _route(self, request: Request, now: float) -> None:
        rule = self._rules[request.router]
        if self._replicas:
            order, reason = rule.choose(RouteRequest(request.adapter, request.num_prompt), now)
            for replica_id in order:
                replica = self._replicas[replica_id]
                if replica.accepts():
                    self._send(request, replica, reason, now)
                    return
                rule.table.answered(replica_id, len(replica.requests), now)
        delay = min(RETRY_MOST_S, RETRY_S * 2.0 ** min(request.num_retries, 9))
        request.num_retries += 1
        self._at(now + delay, lambda then: self._route(request, then))

    def _send(self, request: Request, replica: SimReplica, reason: str, now: float) -> None:
        table = self._rules[request.router].table
        table.sent(replica.replica_id)
        request.replica, request.reason = replica, reason
        if request.adapter == self._watch:
            self._watched.add(replica.replica_id)
        replica.add(request, now)
        table.answered(replica.replica_id, len(replica.requests), now)

    def _ended(self, request: Request) -> None:
        assert request.replica is not None
        self._rules[request.router].table.sent(request.replica.replica_id, -1)
        self._num_open -= 1
        self.done.append(request)

    def _report(self, now: float) -> None:
        """What was true a period ago arrives; what is true now is on its way."""
        dirty = [r for r in self._replicas.values() if r.is_dirty]
        reports = [(r.replica_id, r.report(now)) for r in dirty]

        def arrive(then: float) -> None:
            for replica_id, report in reports:
                for rule in self._rules:
                    if replica_id in rule.table:
                        rule.tell(replica_id, report, then)

        self._at(now + REPORT_S, arrive)
        self._at(now + REPORT_S, self._report)

    def _sample(self, now: float) -> None:
        self.copies.append((now, len(self._watched)))
        self._watched = set()
        self._at(now + SAMPLE_S, self._sample)

    def _begin(self, now: float) -> None:
        """The warm-up is over."""
        self._loads_before = sum(r.num_loads for r in self._replicas.values()) + self._dead_loads
        for replica in self._replicas.values():
            replica.busy_tokens = 0

    def _add_replica(self) -> None:
        spec = self.setup.spec
        replica = SimReplica(f"r{self._num_born}", spec, self._at, self._ended)
        self._num_born += 1
        self._replicas[replica.replica_id] = replica
        for rule in self._rules:
            rule.table.add(replica.replica_id, spec.seats, spec.capacity)

    def _fail(self, failure: Failure, now: float) -> None:
        alive = list(self._replicas.values())
        for index in failure.replicas:
            replica = alive[index]
            del self._replicas[replica.replica_id]
            self._dead_loads += replica.num_loads
            for rule in self._rules:
                rule.table.remove(replica.replica_id)
            self._at(now + failure.down_s, lambda _: self._add_replica())
            for request in replica.die():
                if request.first_token >= 0.0 or request.was_retried:
                    self._num_open -= 1
                    self.lost.append(request)
                else:
                    request.was_retried = True
                    self._route(request, now)

    def _result(self) -> Result:
        begin, objective = self.setup.warm_up_s, self.setup.objective
        done = [r for r in self.done if r.arrived >= begin]
        lost = [r for r in self.lost if r.arrived >= begin]
        waits = [r.first_token - r.arrived for r in done]
        paces = [(r.ended - r.first_token) / max(1, r.num_output - 1) for r in done]
        good = sum(
            wait <= objective.ttft_s and pace <= objective.token_s
            for wait, pace in zip(waits, paces, strict=True)
        )
        loads = sum(r.num_loads for r in self._replicas.values()) + self._dead_loads - self._loads_before
        tokens = [r.busy_tokens for r in self._replicas.values()]
        total = len(done) + len(lost)
        cuts = quantiles(waits, n=100)
        return Result(
            num_requests=total,
            cold_per_1000=1000.0 * loads / total,
            cold_share=sum(r.is_cold for r in done) / total,
            ttft_p50_s=cuts[49],
            ttft_p99_s=cuts[98],
            token_p99_s=quantiles(paces, n=100)[98],
            imbalance=pstdev(tokens) / fmean(tokens),
            attainment=good / total,
            num_lost=len(lost),
            reasons=dict(Counter(r.reason for r in done)),
            copies=self.copies,
        )
