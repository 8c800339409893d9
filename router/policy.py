"""Which replica answers a request. Pure: the fleet's table and the time go in, replicas in order come out.

A request for an adapter goes to the first of these that has a seat:

  resident  where the adapter is in HBM
  loading   where it is on its way there, reported or placed by this router a moment ago
  host      where it is in host memory
  home      one of its homes: cold, or as one more copy of an adapter that needs more replicas
  spill     nobody of these has a seat: another replica with a seat and a slot to spare, by the least
            predicted cost, if it has fewer requests by `slack` at least; or with a slot that nobody uses at
            this moment, if it has fewer by BATCH of the seats of the one that has it
  cold      nobody holds it and its homes have no seat: any replica with one, by the least predicted cost

and if none has a seat it waits where it is warm, or at its home. Waiting beats spilling on queue length
alone, because loads make queues, queues make spills, and spills make loads.

Homes come from rendezvous hashing. An adapter has k of them,

    k = its share of the traffic · requests in the fleet / (TARGET · seats of a replica), rounded up

so a hot adapter spreads before its replica's seats are taken, and with its load k shrinks: of several copies
only those on its first k homes are used while their load is within `slack` of the least, and the others age
away. With more than one copy to choose from, requests that begin alike go to the same one, for its prefix
cache. Base requests go to the less loaded of two replicas drawn at random ("balance").

The predicted cost of a request on a replica, in seconds, counts what it waits for and what it costs the n
requests there (Toppings' rule: an adapter that is not in the running batch adds its pages to every step):

    (queued + own tokens) · prefill + wait for a seat + output · step
        + n · (own tokens · prefill + output · increase of the step)

Adapters are known by name here: a new version of an adapter belongs to the same home. Where an adapter is
held by many or the fleet is large, a random sample stands for all: a decision never walks over the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import Literal

import numpy as np

from router.demand import Demand
from router.fleet_table import HBM, HOST, FleetTable, Replica, Scores, mix

Reason = Literal["resident", "loading", "host", "home", "spill", "cold", "balance"]

DEFAULT_SLACK = 4  # requests
DEFAULT_MEMORY_S = 3.0
DEFAULT_MAX_WAIT_S = 10.0
TARGET = 0.75  # of a replica's seats: beyond it a hot adapter gets one more home
BATCH = 1.0  # of a replica's seats: a spill that evicts must save so many requests' wait
BOUND = 1.25  # of the mean load; a home beyond it is passed over for a cold adapter
EXPECTED_OUTPUT = 128  # tokens; requests rarely tell
MAX_ORDER = 4
NUM_HOMES = 8  # that a cold adapter may choose from
SAMPLE = 16  # replicas that stand for a large fleet
COPIES = 8  # replicas that stand for all that hold an adapter

_64_BITS = (1 << 64) - 1
_WARM: tuple[Reason, ...] = ("resident", "loading", "host")


@dataclass(frozen=True, slots=True)
class RouteRequest:
    adapter: str | None = None  # None: the base model
    num_tokens: int = 0  # of the prompt
    prefix: int = 0  # equal for prompts that begin alike; 0: unknown


@dataclass(frozen=True, slots=True)
class Choice:
    order: tuple[str, ...]  # replica ids, best first
    reason: Reason  # of the first


class ResidencyPolicy:
    """Remembers its own placements; otherwise stateless. Not shared between routers."""

    def __init__(self, rng: Random, slack: int = DEFAULT_SLACK, memory_s: float = DEFAULT_MEMORY_S) -> None:
        self.table = FleetTable(memory_s)
        self.demand = Demand()
        self._rng = rng
        self._slack = slack

    def arrived(self, adapter: str | None, now: float) -> None:
        """Once for each request, before it is placed."""
        self.demand.count(adapter or "", now)

    def choose(self, request: RouteRequest, now: float) -> Choice:
        """The table must not be empty. Asking again for a request that found no place is harmless."""
        self.table.settle(now)
        adapter = request.adapter
        if adapter is None:
            return self._balance(request)
        warm = self._warm(adapter, now)
        num_homes = self.num_homes(adapter, now)
        if not warm:
            order, reason = self._place_cold(request, num_homes, now)
        elif len(warm) == 1 == num_homes and warm[0][1].has_seat:
            order, reason = [warm[0][1]], _WARM[warm[0][0]]  # nothing to choose
        else:
            order, reason = self._among_copies(request, warm, num_homes, now)
        # others decide before this one is sent
        self.table.place(order[0], adapter, now)
        return Choice(tuple(r.replica_id for r in order[:MAX_ORDER]), reason)

    def num_homes(self, adapter: str, now: float) -> int:
        table = self.table
        seats = table.num_seats / len(table.replicas)
        requests = self.demand.share(adapter, now) * table.num_requests
        return min(len(table.replicas), max(1, ceil(requests / (TARGET * seats))))

    def cost(self, request: RouteRequest, replica: Replica, has_adapter: bool) -> float:
        """Seconds; see above."""
        report = replica.report
        base, prefill, row, page = report.cost
        load = replica.load
        step = base + row * load + page * report.lora_pages
        more = row if has_adapter else row + page * report.adapter_pages
        # what it has not reported yet is taken to be like this request
        queued = report.queued_tokens + max(0, load - report.num_requests) * request.num_tokens
        own = prefill * request.num_tokens
        wait = prefill * queued + own
        if load >= replica.seats:
            wait += (load - replica.seats + 1) / replica.seats * EXPECTED_OUTPUT * step
        return wait + EXPECTED_OUTPUT * step + load * (own + EXPECTED_OUTPUT * more)

    def _balance(self, request: RouteRequest) -> Choice:
        replicas = self.table.replicas
        two = self._rng.sample(replicas, min(2, len(replicas)))
        drawn = sorted(two, key=lambda r: (r.load, self.cost(request, r, True)))
        rest = [r for r in self._sample(MAX_ORDER) if r not in drawn]
        return Choice(tuple(r.replica_id for r in (*drawn, *rest)[:MAX_ORDER]), "balance")

    def _warm(self, adapter: str, now: float) -> list[tuple[int, Replica]]:
        """(tier, replica); a sample where there are many."""
        holders = self.table.holders(adapter)
        some: Iterable[Replica] = holders if len(holders) <= COPIES else self._draw_holders(holders)
        tier_of = self.table.tier_of
        tiers = ((tier_of(adapter, r, holders[r], now), r) for r in some)
        return [(tier, r) for tier, r in tiers if tier is not None]

    def _draw_holders(self, holders: dict[Replica, int]) -> list[Replica]:
        """Where many hold it, from all replicas: a list of a thousand would touch each of them."""
        replicas = self.table.replicas
        count = COPIES * len(replicas) // len(holders)
        drawn = [r for r in self._draw(replicas, count) if r in holders] if count <= 4 * COPIES else []
        return drawn or self._draw(list(holders), COPIES)

    def _among_copies(
        self, request: RouteRequest, warm: list[tuple[int, Replica]], num_homes: int, now: float
    ) -> tuple[list[Replica], Reason]:
        assert request.adapter is not None
        num_copies = sum(tier < HOST for tier, _ in warm)
        if 0 < num_copies < min(num_homes, COPIES):
            for home in self._homes(self.table.scores(request.adapter), num_homes):
                lacks_it = home.tier(request.adapter, now) in (None, HOST)
                if lacks_it and self.table.has_idle_slot(home, now):
                    return [home, *(r for _, r in warm)], "home"
        for tier in range(HBM, HOST + 1):
            group = [r for t, r in warm if t == tier and r.has_seat]
            if group:
                best = group[0] if len(group) == 1 else self._best_copy(request, group, num_homes)
                return [best, *(r for _, r in warm if r is not best)], _WARM[tier]
        return self._spill_or_wait(request, warm, now)

    def _best_copy(self, request: RouteRequest, group: list[Replica], num_homes: int) -> Replica:
        """Of those within `slack` of the least load: a home before others, then the prefix's or first."""
        assert request.adapter is not None
        limit = min(r.load for r in group) + self._slack
        group = [r for r in group if r.load <= limit]
        if num_homes == 1 or len(group) == 1:
            return group[int(self.table.scores(request.adapter, group).argmax())]
        scores, ranked = self.table.ranked_scores(request.adapter)
        lowest = ranked[-num_homes]
        homes = [r for r in group if scores[r.place] >= lowest] or group
        if request.prefix:
            prefix = np.uint64(request.prefix & _64_BITS)
            return homes[int(mix(scores[[r.place for r in homes]] ^ prefix).argmax())]
        return min(homes, key=lambda r: r.load)

    def _spill_or_wait(
        self, request: RouteRequest, warm: list[tuple[int, Replica]], now: float
    ) -> tuple[list[Replica], Reason]:
        """Nobody who has it has a seat."""
        waiting = sorted(warm, key=lambda item: (item[0] == HOST, item[1].load))
        order = [r for _, r in waiting]
        others = [r for r in self._sample(SAMPLE) if r not in order]
        least = order[0]
        for has_room, margin in (
            (self.table.has_free_slot, float(self._slack)),
            # taking the slot of an adapter that will be asked for again costs a load later
            (self.table.has_idle_slot, max(self._slack, BATCH * least.seats)),
        ):
            targets = [r for r in others if least.load - r.load >= margin and has_room(r, now)]
            if targets:
                return [min(targets, key=lambda r: self.cost(request, r, False)), *order], "spill"
        return order, _WARM[waiting[0][0]]

    def _place_cold(self, request: RouteRequest, num_homes: int, now: float) -> tuple[list[Replica], Reason]:
        """The first home with a slot to spare, with one to take, with a seat; else anybody with a seat.

        Homes whose load is above the bound come after the others: a cold adapter loses nothing elsewhere.
        """
        assert request.adapter is not None
        homes = self._homes(self.table.scores(request.adapter), max(NUM_HOMES, num_homes))
        bound = self._slack + BOUND * self.table.num_requests / len(self.table.replicas)
        calm = [r for r in homes if r.load <= bound]
        for has_room in (self.table.has_free_slot, self.table.has_idle_slot, _has_seat):
            for home in calm:
                if has_room(home, now):
                    return [home, *(r for r in homes if r is not home)], "home"
        others = [r for r in self._sample(SAMPLE) if r.has_seat]
        if others:
            best = min(others, key=lambda r: self.cost(request, r, False))
            return [best, *homes], "cold"
        return sorted(homes, key=lambda r: r.load), "home"

    def _homes(self, scores: Scores, count: int) -> list[Replica]:
        """Best first; `count` of them, at most SAMPLE."""
        count = min(count, SAMPLE, len(scores))
        best = scores.argsort() if count == len(scores) else scores.argpartition(-count)[-count:]
        places = sorted(best.tolist(), key=lambda place: -int(scores[place]))
        return [self.table.replicas[place] for place in places]

    def _sample(self, count: int) -> list[Replica]:
        replicas = self.table.replicas
        return replicas if len(replicas) <= count else self._draw(replicas, count)

    def _draw(self, replicas: list[Replica], count: int) -> list[Replica]:
        """Up to `count` of them: drawing with replacement is several times faster, and as good here."""
        return list(dict.fromkeys(self._rng.choices(replicas, k=count)))


def _has_seat(replica: Replica, now: float) -> bool:
    return replica.has_seat
