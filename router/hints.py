"""Which replicas are told of requests that still wait in the router, so that adapters are there first. Pure.

Who goes next is looked at: one request for each of the next adapters. Its replica is the one that the policy
chooses now. Unless that one reports the adapter in HBM or on its way there, it is told, and the policy counts
a placement, so that the request goes there when its turn comes, as all others for that adapter do.

A replica believes a hint for HINT_S, and for so long that version is not looked at again. Then, if a request
still waits and nobody has the adapter, the same replica is told once more. Nothing is told to one that has as
many loads to do as engines do at once by default, for requests that are there or by hints: loads for requests
far behind would push out what those in front need. Who would be refused does not wait, and a replica
that is stopping is not in the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.config import DEFAULT_PARALLEL_LOADS
from engine.prefetch import HINT_S
from router.fleet_table import HBM, LOADING, Replica
from router.policy import Choice, ResidencyPolicy, RouteRequest

MAX_DECISIONS = 16  # in a look at who waits: 50 us each, a thousand replicas or one


class Waiting(NamedTuple):
    request: RouteRequest
    ref: dict[str, str]  # of its adapter, as `engine.wire` encodes it


class Hint(NamedTuple):
    replica_id: str
    ref: dict[str, str]


class _Look(NamedTuple):
    until: float
    replica_id: str | None  # that was told


Version = tuple[str, ...]


class Hints:
    """Times passed in never go back."""

    def __init__(self, policy: ResidencyPolicy) -> None:
        self._policy = policy
        self._looks: dict[Version, _Look] = {}  # oldest first
        # replica, told last at the end -> adapter -> until when it may be loading
        self._told: dict[str, dict[str, float]] = {}

    @property
    def num_ahead(self) -> int:
        """Adapters that are worth a look: those whose requests go next."""
        return DEFAULT_PARALLEL_LOADS * len(self._policy.table.replicas)

    def due(self, waiting: Iterable[Waiting], now: float) -> list[Hint]:
        """`waiting`: who goes next, in order."""
        self._forget(now)
        hints: list[Hint] = []
        num_left = MAX_DECISIONS if self._policy.table.replicas else 0
        for one in waiting:
            before = self._looks.get(_version(one))
            if before is not None and before.until > now:
                continue
            if not num_left:
                break
            num_left -= 1
            told = before.replica_id if before is not None else None
            if told is not None and self._is_unheard_of(one, told, now):
                hints += self._tell(one, told, now)
            else:
                hints += self._follow(one, self._policy.choose(one.request, now), now)
        return hints

    def chosen(self, one: Waiting, choice: Choice, now: float) -> list[Hint]:
        """It waits for the first of its choice, which is full."""
        self._forget(now)
        before = self._looks.get(_version(one))
        return [] if before is not None and before.until > now else self._follow(one, choice, now)

    def _follow(self, one: Waiting, choice: Choice, now: float) -> list[Hint]:
        replica_id = choice.order[0]
        assert one.request.adapter is not None
        # a placement is no news: nobody may have gone there yet
        if self._policy.table[replica_id].report.tier(one.request.adapter) in (HBM, LOADING):
            self._looked(one, None, now)
            return []
        return self._tell(one, replica_id, now)

    def _is_unheard_of(self, one: Waiting, replica_id: str, now: float) -> bool:
        """The replica is there, and nobody has told of the adapter since: a first load is not reported."""
        table, adapter = self._policy.table, one.request.adapter
        assert adapter is not None
        return replica_id in table and all(r.tier(adapter, now) is None for r in table.holders(adapter))

    def _tell(self, one: Waiting, replica_id: str, now: float) -> list[Hint]:
        table, adapter = self._policy.table, one.request.adapter
        assert adapter is not None
        if self._num_loads(table[replica_id], now) >= DEFAULT_PARALLEL_LOADS:
            return []
        table.place(table[replica_id], adapter, now)
        self._looked(one, replica_id, now)
        self._told[replica_id] = self._told.pop(replica_id, {}) | {adapter: now + HINT_S}
        return [Hint(replica_id, one.ref)]

    def _num_loads(self, replica: Replica, now: float) -> int:
        """For requests that are there, as it has reported; and of what it was told and has not reported."""
        told = self._told.get(replica.replica_id, {})
        for adapter in [a for a, until in told.items() if until <= now or replica.report.tier(a) is not None]:
            del told[adapter]
        if not told:
            self._told.pop(replica.replica_id, None)
        return len(replica.report.loading) + len(told)

    def _looked(self, one: Waiting, replica_id: str | None, now: float) -> None:
        self._looks.pop(_version(one), None)  # so that the oldest stays first
        self._looks[_version(one)] = _Look(now + HINT_S, replica_id)

    def _forget(self, now: float) -> None:
        # a version whose request still waits is looked at again much sooner
        while self._looks and next(iter(self._looks.values())).until <= now - HINT_S:
            del self._looks[next(iter(self._looks))]
        # a replica that is gone is not asked about again
        while self._told and max(next(iter(self._told.values())).values()) <= now:
            del self._told[next(iter(self._told))]


def _version(one: Waiting) -> Version:
    return tuple(one.ref.values())
