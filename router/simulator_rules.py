"""Routing rules for the simulator: ours, and what others do, over the same reports and their own books.

random        any replica that accepts
two           the less loaded of two drawn at random (Mitzenmacher, 2001)
multiplexing  Ray Serve 2.60's default router with `serve.multiplexed`: of two drawn from those that have the
              adapter the less loaded; if none has it, or all are full, two of those with the fewest adapters;
              requests for an adapter that is being placed wait until it is reported, a second at most
hashing       the adapter's first home that accepts, whatever its load
cost          Toppings (Li et al., 2024): least (prefill / output + increase of the step) · requests there,
              where the step would not exceed the objective
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from router.fleet_table import HBM, LOADING, FleetTable, Replica, Report
from router.policy import EXPECTED_OUTPUT, ResidencyPolicy, RouteRequest

WAIT_FOR_REPORT_S = 1.0


class Rule:
    """One router. `choose` answers (replica ids in order, reason); none: ask again later."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.table = FleetTable(memory_s=3.0)

    def arrived(self, adapter: str, now: float) -> None:
        """A request, before it is placed."""

    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        raise NotImplementedError

    def tell(self, replica_id: str, report: Report, now: float) -> None:
        self.table.tell(replica_id, report, now)

    def least_loaded_of_two(self, replicas: Sequence[Replica]) -> list[str]:
        drawn = self.rng.sample(replicas, min(2, len(replicas)))
        return [r.replica_id for r in sorted(drawn, key=lambda r: r.load) if r.load < r.capacity]


class Ours(Rule):
    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.policy = ResidencyPolicy(rng)
        self.table = self.policy.table

    def arrived(self, adapter: str, now: float) -> None:
        self.policy.arrived(adapter, now)

    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        choice = self.policy.choose(request, now)
        return choice.order, choice.reason


class AtRandom(Rule):
    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        return [
            r.replica_id for r in self.rng.sample(self.table.replicas, min(3, len(self.table.replicas)))
        ], ""


class PowerOfTwo(Rule):
    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        return self.least_loaded_of_two(self.table.replicas), ""


class Multiplexing(Rule):
    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._placed: dict[str, float] = {}

    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        assert request.adapter is not None
        holders = [
            r for r in self.table.holders(request.adapter) if r.tier(request.adapter, now) in (HBM, LOADING)
        ]
        if holders:
            self._placed.pop(request.adapter, None)
            order = self.least_loaded_of_two(holders)
            if order:
                return order, ""
        elif now - self._placed.get(request.adapter, -1e9) < WAIT_FOR_REPORT_S:
            return (), ""
        self._placed[request.adapter] = now
        sizes = [len(r.report.resident) + len(r.report.loading) for r in self.table.replicas]
        fewest = min(sizes)
        return self.least_loaded_of_two(
            [r for r, size in zip(self.table.replicas, sizes, strict=True) if size == fewest]
        ), ""


class Hashing(Rule):
    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        assert request.adapter is not None
        scores = self.table.scores(request.adapter)
        best = sorted(scores.argpartition(-min(3, len(scores)))[-3:].tolist(), key=lambda i: -int(scores[i]))
        return [self.table.replicas[i].replica_id for i in best], ""


class CostRule(Rule):
    def __init__(self, rng: Random, max_step_s: float) -> None:
        super().__init__(rng)
        self._max_step_s = max_step_s

    def choose(self, request: RouteRequest, now: float) -> tuple[Sequence[str], str]:
        def cost(replica: Replica) -> float:
            report = replica.report
            base, prefill, row, page = report.cost
            increase = row if request.adapter in report.resident else row + page * report.adapter_pages
            step = base + row * replica.load + page * report.lora_pages + increase
            if step > self._max_step_s or replica.load >= replica.capacity:
                return float("inf")
            return (prefill * request.num_tokens / EXPECTED_OUTPUT + increase) * (replica.load + 1)

        best = min(self.table.replicas, key=lambda r: (cost(r), r.load))
        return [best.replica_id], ""


RULES: dict[str, Callable[[Random], Rule]] = {
    "lorafleet": Ours,
    "random": AtRandom,
    "power of two": PowerOfTwo,
    "Serve multiplexing": Multiplexing,
    "consistent hashing": Hashing,
    "Toppings' cost rule": lambda rng: CostRule(rng, max_step_s=0.05),
}
