"""What a router knows of its replicas: what they told last, and what it sent them since. Pure.

Reports are 0.1 to 0.3 s old when they arrive and come only when something changed. Between them the table
goes by its own books: a request that was sent counts at once; an adapter that was placed counts as loading
until its replica reports it, `memory_s` at most; and what an answer told of a replica's load counts for
ANSWER_S, after which the last report is true again, or there would be a newer one. Nothing but `remove` walks
over more than it changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from engine.step_cost import StepCost

HBM, LOADING, HOST, PLACED = range(4)
"""Tiers, best first; and what was placed there and is not reported, which is loading for a while."""

ANSWER_S = 0.5

MAX_RANKED = 128  # adapters with more than one home; two numbers a replica each

UNKNOWN_COST = StepCost(base_s=0.02, prefill_s=2e-4, row_s=2e-4, lora_page_s=1e-5)
"""Until a replica has measured its own: only differences matter then, and these are in proportion."""


@dataclass(frozen=True, slots=True)
class Report:
    resident: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()
    num_requests: int = 0  # running and waiting
    free_slots: int = 1  # adapters it can take without giving up one that was used lately
    idle_slots: int = 1  # adapters it can take without giving up one that is in use now
    queued_tokens: int = 0  # of prompts, to be computed
    lora_pages: int = 0  # of the adapters in the running batch
    adapter_pages: int = 0  # mean of the resident ones
    cost: StepCost = UNKNOWN_COST

    def names(self) -> frozenset[str]:
        return self.resident | self.loading | self.host

    def tier(self, adapter: str) -> int | None:
        if adapter in self.resident:
            return HBM
        if adapter in self.loading:
            return LOADING
        return HOST if adapter in self.host else None


@dataclass(slots=True, eq=False)
class Replica:
    replica_id: str
    seats: int  # requests that run at once
    capacity: int  # requests that it accepts, running and waiting
    place: int = 0  # in the table's vector of seeds
    report: Report = field(default_factory=Report)
    load: int = 0  # requests on it, ours and others'
    placed: dict[str, float] = field(default_factory=dict)  # adapter -> when to forget it; oldest first
    num_sent: int = 0  # our requests on it
    num_heard: int = 0  # all requests on it, when it was last heard of
    num_sent_then: int = 0
    answered_at: float | None = None  # None: it was last heard of by a report

    @property
    def has_seat(self) -> bool:
        return self.load < self.seats

    @property
    def num_free(self) -> int:
        """Requests more that it accepts."""
        return max(0, self.capacity - self.load)

    def tier(self, adapter: str, now: float) -> int | None:
        reported = self.report.tier(adapter)
        is_placed = reported != HBM and self.placed.get(adapter, now) > now
        return LOADING if is_placed else reported


Scores = npt.NDArray[np.uint64]
_NOBODY: dict[Replica, int] = {}


class FleetTable:
    def __init__(self, memory_s: float) -> None:
        self.replicas: list[Replica] = []
        self.num_requests = 0  # on all of them
        self.num_seats = 0
        self.num_free = 0  # requests more that would be accepted
        self._memory_s = memory_s
        self._by_id: dict[str, Replica] = {}
        self._holders: dict[
            str, dict[Replica, int]
        ] = {}  # adapter -> replica -> its reported tier, or PLACED
        self._answers: deque[tuple[float, Replica]] = deque()
        self._seeds: Scores = np.zeros(0, np.uint64)
        self._ranked: dict[str, tuple[Scores, Scores]] = {}  # of `ranked_scores`, for these replicas

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._by_id

    def __getitem__(self, replica_id: str) -> Replica:
        return self._by_id[replica_id]

    def add(self, replica_id: str, seats: int, capacity: int) -> None:
        replica = Replica(replica_id, seats, capacity, place=len(self.replicas))
        self._by_id[replica_id] = replica
        self.replicas.append(replica)
        self._seeds = np.append(self._seeds, np.uint64(hash64(replica_id)))
        self._ranked.clear()
        self.num_seats += seats
        self.num_free += capacity

    def remove(self, replica_id: str) -> None:
        replica = self._by_id.pop(replica_id)
        self.num_requests -= replica.load
        self.num_seats -= replica.seats
        self.num_free -= replica.num_free
        for name in replica.report.names() | replica.placed.keys():
            self._drop_holder(name, replica)
        last = self.replicas.pop()
        if last is not replica:  # the last one moves to its place
            self.replicas[replica.place] = last
            self._seeds[replica.place] = self._seeds[last.place]
            last.place = replica.place
        self._seeds = self._seeds[:-1].copy()
        self._ranked.clear()

    def tell(self, replica_id: str, report: Report, now: float) -> None:
        """A replica reported."""
        replica = self._by_id[replica_id]
        self._forget_placements(replica, now)
        before, after = replica.report, report
        for name in after.names() & replica.placed.keys():
            del replica.placed[name]
        replica.report = report
        pairs = (
            (before.resident, after.resident), (before.loading, after.loading), (before.host, after.host)
        )  # fmt: skip
        for name in frozenset[str]().union(*(was ^ now_is for was, now_is in pairs)):
            tier = after.tier(name)
            if tier is None and name in replica.placed:
                tier = PLACED
            if tier is not None:
                self._holders.setdefault(name, {})[replica] = tier
            else:
                self._drop_holder(name, replica)
        self._hear(replica, report.num_requests)

    def answered(self, replica_id: str, num_requests: int, now: float) -> None:
        """An answer told how many requests are on it."""
        replica = self._by_id.get(replica_id)
        if replica is not None:
            self._hear(replica, num_requests)
            replica.answered_at = now
            self._answers.append((now, replica))

    def settle(self, now: float) -> None:
        """Forget what is too old; before choosing."""
        while self._answers and self._answers[0][0] < now - ANSWER_S:
            answered_at, replica = self._answers.popleft()
            if replica.answered_at == answered_at:  # else there is newer news
                self._hear(replica, replica.report.num_requests)

    def sent(self, replica_id: str, count: int = 1) -> None:
        """A request of ours was sent there, or (-1) has ended."""
        replica = self._by_id.get(replica_id)
        if replica is not None:
            replica.num_sent = max(0, replica.num_sent + count)
            self._count(replica)

    def has_free_slot(self, replica: Replica, now: float) -> bool:
        """And a seat."""
        return replica.has_seat and replica.report.free_slots > self._num_placed(replica, now)

    def has_idle_slot(self, replica: Replica, now: float) -> bool:
        """And a seat."""
        return replica.has_seat and replica.report.idle_slots > self._num_placed(replica, now)

    def place(self, replica: Replica, adapter: str, now: float) -> None:
        """It will load the adapter, unless it has it."""
        if adapter not in replica.report.resident and adapter not in replica.report.loading:
            self._forget_placements(replica, now)
            replica.placed.pop(adapter, None)  # so that the oldest stays first
            replica.placed[adapter] = now + self._memory_s
            self._holders.setdefault(adapter, {}).setdefault(replica, PLACED)

    def holders(self, adapter: str) -> dict[Replica, int]:
        """All that hold it in some tier or load it, and perhaps some that no longer do: see `tier_of`."""
        return self._holders.get(adapter, _NOBODY)

    def tier_of(self, adapter: str, holder: Replica, reported: int, now: float) -> int | None:
        """`reported`: its value in `holders`. As `Replica.tier`, and looks into no report.

        A decision asks this of several replicas of a thousand, none of which is in the processor's cache.
        """
        if reported < HOST:
            return reported
        if holder.placed.get(adapter, now) > now:
            return LOADING
        return HOST if reported == HOST else None

    def scores(self, adapter: str, of: list[Replica] | None = None) -> Scores:
        """Rendezvous: the higher, the more a replica is the adapter's home. By place, or those of `of`.

        A replica's score depends on the adapter and on its own id alone, so routers that share nothing agree,
        and a replica that comes or goes moves only its own adapters.
        """
        seeds = self._seeds if of is None else self._seeds[[r.place for r in of]]
        return rendezvous(adapter, seeds)

    def ranked_scores(self, adapter: str) -> tuple[Scores, Scores]:
        """`scores`, and the same in ascending order. Kept, because the hottest ask for it all the time."""
        if adapter not in self._ranked:
            if len(self._ranked) == MAX_RANKED:
                self._ranked.clear()
            scores = self.scores(adapter)
            self._ranked[adapter] = scores, np.sort(scores)
        return self._ranked[adapter]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.replicas)

    def check_invariants(self) -> None:
        for replica in self.replicas:
            assert replica.num_sent <= replica.load
        assert self.num_requests == sum(r.load for r in self.replicas)
        assert self.num_seats == sum(r.seats for r in self.replicas)
        assert self.num_free == sum(max(0, r.capacity - r.load) for r in self.replicas)
        assert [r.place for r in self.replicas] == list(range(len(self.replicas)))
        assert list(map(int, self._seeds)) == [hash64(r.replica_id) for r in self.replicas]
        for replica in self.replicas:
            for name in replica.report.names() | replica.placed.keys():
                tier = replica.report.tier(name)
                assert self._holders[name][replica] == (PLACED if tier is None else tier)
        present = set(self.replicas)
        assert all(holders and holders.keys() <= present for holders in self._holders.values())

    def _drop_holder(self, name: str, replica: Replica) -> None:
        holders = self._holders[name]
        del holders[replica]
        if not holders:
            del self._holders[name]

    def _hear(self, replica: Replica, num_requests: int) -> None:
        replica.num_heard, replica.num_sent_then = num_requests, replica.num_sent
        replica.answered_at = None
        self._count(replica)

    def _num_placed(self, replica: Replica, now: float) -> int:
        """Placements that its report does not show yet."""
        self._forget_placements(replica, now)
        return len(replica.placed)

    def _forget_placements(self, replica: Replica, now: float) -> None:
        placed = replica.placed
        while placed and placed[name := next(iter(placed))] <= now:
            del placed[name]
            if name not in replica.report.names():
                self._drop_holder(name, replica)

    def _count(self, replica: Replica) -> None:
        if self._by_id.get(replica.replica_id) is not replica:
            return  # it is gone
        before, before_free = replica.load, replica.num_free
        after = max(replica.num_sent, replica.num_heard + replica.num_sent - replica.num_sent_then)
        replica.load = after
        self.num_requests += after - before
        self.num_free += replica.num_free - before_free


def hash64(name: str) -> int:
    """The same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous(adapter: str, seeds: Scores) -> Scores:
    """`seeds`: hashes of replica ids."""
    return mix(seeds ^ np.uint64(hash64(adapter)))


def mix(x: Scores) -> Scores:
    """Each number is scattered over all 64 bits (MurmurHash3's finaliser). Modifies `x`."""
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xFF51AFD7ED558CCD)
    x ^= x >> np.uint64(33)
    x *= np.uint64(0xC4CEB9FE1A85EC53)
    x ^= x >> np.uint64(33)
    return x
