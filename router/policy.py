"""Which replica answers a request. Pure: snapshots and the time go in, an order of replicas comes out.

An adapter's homes are all replicas in the order of rendezvous hashing, so that routers which share no state
agree, and a replica that comes or goes moves only its own adapters. A request for an adapter goes to

  1. a replica where it is warm, the best tier first: resident in HBM, loading, in the host cache; of several,
     the first home whose load is within `slack` of the least (so that a calm adapter shrinks back to one);
  2. else (cold) its first home with room; else the first home with a free seat; else the least loaded.

When the warm choice would make it wait for a seat, it spills to the next home with room, if that one's load
is lower by at least `slack`. Room is a free seat in the batch and a free adapter slot: spilling on queue
length alone makes loads, loads make queues, and queues make spills. Own placements count as loading from
the moment of the decision until the replica reports them, `memory_s` at most. Base requests go to the less
loaded of two replicas drawn at random. If nobody in the order accepts, the caller asks again later.

Adapters are known by name here: a new version of an adapter belongs to the same home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal

Reason = Literal["resident", "loading", "host", "home", "spill", "balance"]

DEFAULT_SLACK = 4  # requests
DEFAULT_MEMORY_S = 3.0

_TIERS: tuple[Reason, ...] = ("resident", "loading", "host")
_COLD = len(_TIERS)


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    replica_id: str
    resident: frozenset[str]
    host: frozenset[str]
    loading: frozenset[str]
    num_running: int
    num_waiting: int
    free_slots: int  # adapters it can take without evicting one that is in use
    max_num_seqs: int  # seats: requests that run at once
    queue_len: int = 0  # requests on it as the caller's own books say; fresher than the two above

    @property
    def load(self) -> int:
        return max(self.queue_len, self.num_running + self.num_waiting)

    @property
    def has_seat(self) -> bool:
        return self.load < self.max_num_seqs


@dataclass(frozen=True, slots=True)
class Choice:
    order: tuple[str, ...]  # replica ids, best first
    reason: Reason  # of the first


class ResidencyPolicy:
    """Remembers its own placements; otherwise stateless. Not shared between routers."""

    def __init__(self, rng: Random, slack: int = DEFAULT_SLACK, memory_s: float = DEFAULT_MEMORY_S) -> None:
        self._rng = rng
        self._slack = slack
        self._memory_s = memory_s
        self._placed: dict[str, dict[str, float]] = {}  # replica -> adapter -> when to forget it

    def choose(self, adapter: str | None, replicas: Sequence[ReplicaSnapshot], now: float) -> Choice:
        """None is the base model. `replicas` must not be empty."""
        if adapter is None:
            return self._balance(replicas)
        self._forget(replicas, now)
        homes = rendezvous_order(adapter, replicas)
        tiers = {r.replica_id: self._tier(adapter, r) for r in homes}
        best = min(tiers.values())
        if best == _COLD:
            order = sorted(homes, key=self._cold_key)  # stable: homes stay in order
            reason: Reason = "home" if order[0] is homes[0] else "spill"
        else:
            order, reason = self._warm(homes, tiers, best)
        self.routed(adapter, order[0].replica_id, now)  # others decide before this one is sent
        return Choice(tuple(r.replica_id for r in order), reason)

    def routed(self, adapter: str, replica_id: str, now: float) -> None:
        """It went there: the first of the order, or a later one because those before it were full."""
        self._placed.setdefault(replica_id, {})[adapter] = now + self._memory_s

    def _balance(self, replicas: Sequence[ReplicaSnapshot]) -> Choice:
        drawn = self._rng.sample(list(replicas), min(2, len(replicas)))
        drawn.sort(key=lambda r: r.load)
        rest = sorted((r for r in replicas if r not in drawn), key=lambda r: r.load)
        return Choice(tuple(r.replica_id for r in (*drawn, *rest)), "balance")

    def _warm(
        self, homes: list[ReplicaSnapshot], tiers: dict[str, int], best: int
    ) -> tuple[list[ReplicaSnapshot], Reason]:
        group = [r for r in homes if tiers[r.replica_id] == best]
        limit = min(r.load for r in group) + self._slack
        pick = next(r for r in group if r.load <= limit)
        others = [r for r in homes if tiers[r.replica_id] > best]
        targets = sorted((r for r in others if self._has_room(r)), key=lambda r: tiers[r.replica_id])
        order = [pick, *sorted((r for r in group if r is not pick), key=lambda r: r.load), *targets]
        if not pick.has_seat:
            for target in targets:
                if pick.load - target.load >= self._slack:
                    return [target, *(r for r in order if r is not target)], "spill"
        return order, _TIERS[best]

    def _cold_key(self, replica: ReplicaSnapshot) -> tuple[int, int]:
        if self._has_room(replica):
            return 0, 0
        return (1, 0) if replica.has_seat else (2, replica.load)

    def _has_room(self, replica: ReplicaSnapshot) -> bool:
        return replica.has_seat and self._free_slots(replica) > 0

    def _free_slots(self, replica: ReplicaSnapshot) -> int:
        placed = self._placed.get(replica.replica_id, {})
        unreported = sum(a not in replica.resident and a not in replica.loading for a in placed)
        return replica.free_slots - unreported

    def _tier(self, adapter: str, replica: ReplicaSnapshot) -> int:
        if adapter in replica.resident:
            return 0
        if adapter in replica.loading or adapter in self._placed.get(replica.replica_id, {}):
            return 1
        return 2 if adapter in replica.host else _COLD

    def _forget(self, replicas: Sequence[ReplicaSnapshot], now: float) -> None:
        present = {r.replica_id for r in replicas}
        self._placed = {
            replica_id: {adapter: until for adapter, until in placed.items() if until > now}
            for replica_id, placed in self._placed.items()
            if replica_id in present
        }


def rendezvous_order(adapter: str, replicas: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """Each replica's place depends on the adapter and on its own id alone."""
    return sorted(
        replicas,
        key=lambda r: blake2b(f"{adapter}\0{r.replica_id}".encode(), digest_size=8).digest(),
    )
