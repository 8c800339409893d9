"""How many replicas a fleet should have. Pure: loads and the time go in, a plan comes out.

A replica's need is the share of it that its requests take, 1 being the whole: the largest of

  seats   requests, running and waiting, of those it runs at once
  pages   of running requests, their adapters and the prompts in its queue, of the pool
  time    seconds of prefill in its queue, of the QUEUE_S that they may take

The fleet's need is their sum, or the adapters in use now, of a replica's slots, if that is more: each counts
once, or its copies would look like demand.

Up, when the need is above HIGH of what there is for `up_after_s`: to so many that it is TARGET of them. Down,
when it would be below LOW of one replica less for `down_after_s`: by one, and by one more once that has gone,
as long as that stays true; those that never came go too. To none, when there was no request for as long.

Serve, not this, picks who goes. So before one goes, every adapter that was in use lately is on two replicas:
the second one is where routers will look for it (`missing_copies`). That is waited for HANDOVER_S at most, as
its source may be down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from router.fleet_table import hash64, rendezvous

HIGH, TARGET, LOW = 0.8, 0.65, 0.5
QUEUE_S = 2.0
HANDOVER_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    replica_id: str
    seats: int
    slots: int
    num_requests: int = 0  # running and waiting
    queued_tokens: int = 0  # of prompts, to be computed
    prefill_s: float = 0.0  # a token of them; 0: not known yet
    num_pages: int = 1
    used_pages: int = 0  # by running requests and their adapters
    page_tokens: int = 1
    in_use: frozenset[str] = frozenset()  # adapters that have requests now
    wanted: frozenset[str] = frozenset()  # that had some lately
    holds: frozenset[str] = frozenset()  # in device or host memory

    @property
    def need(self) -> float:
        pages = self.used_pages + self.queued_tokens / self.page_tokens
        return max(
            self.num_requests / self.seats,
            pages / self.num_pages,
            self.prefill_s * self.queued_tokens / QUEUE_S,
        )


@dataclass(frozen=True, slots=True)
class Handover:
    adapter: str
    to: str  # replica id


@dataclass(frozen=True, slots=True)
class Plan:
    num_replicas: int | None  # None: as many as were asked for before, which this does not know
    handovers: tuple[Handover, ...] = ()  # without these nobody may go


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int
    up_after_s: float
    down_after_s: float


class Autoscaler:
    """Remembers what it asked for and since when it wants a change."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._wanted: int | None = None  # replicas; None: no change yet, and some may be starting
        self._high_since: float | None = None
        self._low_since: float | None = None
        self._handing_since: float | None = None

    def plan(self, loads: Sequence[ReplicaLoad], now: float) -> Plan:
        """`loads`: of all replicas that serve now."""
        bounds = self._bounds
        if not loads:
            self._wanted = self._high_since = self._low_since = None
            return Plan(None)
        need = fleet_need(loads)
        there = min(bounds.most, max(bounds.least, len(loads)))
        # somebody asked while the last one was to go, or Serve has started one for somebody who did
        if self._wanted == 0 and need > 0:
            self._wanted = there
        wanted = there if self._wanted is None else self._wanted
        self._high_since = _since(self._high_since, need > HIGH * len(loads), now)
        self._low_since = _since(self._low_since, self._can_spare_one(wanted, need), now)
        if self._high_since is not None and now - self._high_since >= bounds.up_after_s:
            self._wanted = max(wanted, min(bounds.most, ceil(need / TARGET)))
        if self._low_since is None or now - self._low_since < bounds.down_after_s:
            self._handing_since = None
        elif len(loads) <= wanted:  # else the last one that was to go is still there
            return self._one_less(wanted, missing_copies(loads), now)
        return Plan(self._wanted)

    def _can_spare_one(self, wanted: int, need: float) -> bool:
        if wanted <= max(1, self._bounds.least):
            return need == 0 and wanted > self._bounds.least
        return need <= LOW * (wanted - 1)

    def _one_less(self, wanted: int, handovers: tuple[Handover, ...], now: float) -> Plan:
        self._handing_since = now if self._handing_since is None else self._handing_since
        if handovers and now - self._handing_since < HANDOVER_S:
            return Plan(self._wanted, handovers)
        self._handing_since = None
        self._wanted = wanted - 1
        return Plan(self._wanted)


def fleet_need(loads: Sequence[ReplicaLoad]) -> float:
    """In replicas."""
    in_use = {name for load in loads for name in load.in_use}
    return max(sum(load.need for load in loads), len(in_use) / max(load.slots for load in loads))


def missing_copies(loads: Sequence[ReplicaLoad]) -> tuple[Handover, ...]:
    """For each adapter that is wanted and that one replica alone holds: who should hold it too.

    That is its home among the others, so if its holder goes, routers ask for it where it is.
    """
    if len(loads) < 2:
        return ()
    num_holders = Counter(name for load in loads for name in load.holds)
    wanted = {name for load in loads for name in load.wanted}
    handovers = []
    for name in sorted(name for name in wanted if num_holders[name] == 1):
        others = [load.replica_id for load in loads if name not in load.holds]
        scores = rendezvous(name, np.array([hash64(other) for other in others], np.uint64))
        handovers.append(Handover(name, others[int(scores.argmax())]))
    return tuple(handovers)


def _since(before: float | None, is_true: bool, now: float) -> float | None:
    if not is_true:
        return None
    return now if before is None else before
