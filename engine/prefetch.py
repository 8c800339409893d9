"""Adapters that are copied to the pool before a request asks for them. Pure: no tensors, no clock.

First those that were hinted: a request is on its way, so they get pages and a slot as it would get them, but
nothing that a request which is here needs. Then what is worth most of all in host memory, by the order that
evicts (`engine.eviction`): into free slots, and into pages that are free or hold prefixes worth less.

A guess that was evicted unused is not made again until somebody has asked for that adapter; so there are no
more wasted copies than requests and loads.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Container, Set
from enum import Enum
from itertools import islice
from typing import NamedTuple

from engine.memory import Needed, PoolMemory

HINT_S = 3.0
"""For so long a hint is believed."""

MAX_TRIED = 4
"""Guesses that are looked at in a step: a smaller one may fit where the best one does not."""

_MIN_GUESSES = 1024
"""Fewer are not worth a look for those that can be forgotten."""


class Reason(Enum):
    HINT = "hint"
    POPULARITY = "popularity"


class Prefetch(NamedTuple):
    digest: str
    num_pages: int
    reason: Reason


class _Hint(NamedTuple):
    num_pages: int
    until: float


class Prefetcher:
    """Times passed in never go back."""

    def __init__(self, memory: PoolMemory, by_popularity: bool = True) -> None:
        self.num_copied = Counter(dict.fromkeys(Reason, 0))
        self.num_used = Counter(dict.fromkeys(Reason, 0))  # of these, asked for while they were in the pool
        self._memory = memory
        self._by_popularity = by_popularity
        self._hints: dict[str, _Hint] = {}  # oldest first
        # in host memory when they were entered, and not in the pool; digest -> worth, pages
        self._guesses: dict[str, tuple[float, int]] = {}
        self._by_worth: list[tuple[float, str]] = []  # of these, sorted
        self._num_remembered = _MIN_GUESSES
        self._ahead: dict[str, Reason] = {}  # copied and not asked for yet

    def hint(self, digest: str, num_pages: int, now: float) -> None:
        """A request for it is on its way."""
        self._memory.order.expected(digest, now)
        adapter = self._memory.residency.get(digest)
        if adapter is not None:
            self._memory.residency.revalue(adapter)
            return
        self._hints.pop(digest, None)
        self._hints[digest] = _Hint(num_pages, now + HINT_S)

    def in_host(self, digest: str, num_pages: int) -> None:
        """Its image is in host memory, so it may be copied."""
        self._drop_guess(digest)
        if self._by_popularity and self._memory.residency.get(digest) is None:
            worth = self._memory.order.ahead_of_use(digest, num_pages)
            self._guesses[digest] = worth, num_pages
            bisect.insort(self._by_worth, (worth, digest))

    def asked(self, digest: str) -> None:
        """A request for it is here; it will see to the copy itself."""
        self._hints.pop(digest, None)
        self._drop_guess(digest)
        if digest in self._ahead:
            self._memory.residency.asked(digest)
            self.num_used[self._ahead.pop(digest)] += 1

    def evicted(self, digest: str, num_pages: int) -> None:
        """Its image may still be in host memory."""
        if self._memory.residency.get(digest) is not None:
            return  # it came back in the same step
        if self._ahead.pop(digest, None) is None:
            self.in_host(digest, num_pages)

    def forget(self, digest: str) -> None:
        """It has left the pool, and nobody will ask for it any more."""
        self._hints.pop(digest, None)
        if self._memory.residency.get(digest) is None:
            self._ahead.pop(digest, None)
        self._drop_guess(digest)

    def choose(
        self, loadable: Container[str] | None, waiting: Set[str], num_spare_pages: int, now: float
    ) -> Prefetch | None:
        """What to copy now, if anything. `loadable`: digests in host memory, None: all.

        `waiting`: digests whose requests wait; they see to their copies themselves, and what they need does
        not yield to a hint. `num_spare_pages`: must be left free.
        """
        if self._memory.residency.absent_pinned:
            return None  # they come first, and wait for room
        return self._hinted(loadable, waiting, num_spare_pages, now) or self._guess(
            loadable, waiting, num_spare_pages
        )

    def copied(self, prefetch: Prefetch) -> None:
        """It is in the pool."""
        self._hints.pop(prefetch.digest, None)
        self._drop_guess(prefetch.digest)
        self._ahead[prefetch.digest] = prefetch.reason
        self.num_copied[prefetch.reason] += 1

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {
            reason.value: {"copied": self.num_copied[reason], "used": self.num_used[reason]}
            for reason in Reason
        }

    def check_invariants(self) -> None:
        ahead = [adapter for adapter in self._memory.residency if adapter.is_ahead]
        assert set(self._ahead) == {adapter.digest for adapter in ahead}
        assert all(adapter.num_leases == 0 for adapter in ahead)
        assert self._by_worth == sorted((worth, digest) for digest, (worth, _) in self._guesses.items())

    def _hinted(
        self, loadable: Container[str] | None, waiting: Set[str], num_spare_pages: int, now: float
    ) -> Prefetch | None:
        while self._hints and next(iter(self._hints.values())).until <= now:
            del self._hints[next(iter(self._hints))]
        memory, needed = self._memory, Needed(waiting, waiting)
        for digest, hint in self._hints.items():
            if digest in waiting or self._is_stale(digest, loadable):
                continue
            if memory.has_slot(needed) and memory.can_take(hint.num_pages + num_spare_pages, needed):
                return Prefetch(digest, hint.num_pages, Reason.HINT)
            return None
        return None

    def _guess(
        self, loadable: Container[str] | None, waiting: Set[str], num_spare_pages: int
    ) -> Prefetch | None:
        memory = self._memory
        if not memory.residency.has_free_slot:
            return None
        self._forget_stale(loadable)
        while self._by_worth and self._is_stale(self._by_worth[-1][1], loadable):
            self._drop_guess(self._by_worth[-1][1])
        for worth, digest in islice(reversed(self._by_worth), MAX_TRIED):
            num_pages = self._guesses[digest][1]
            if digest in waiting or self._is_stale(digest, loadable):
                continue
            if memory.has_cheaper(num_pages + num_spare_pages, worth):
                return Prefetch(digest, num_pages, Reason.POPULARITY)
        return None

    def _is_stale(self, digest: str, loadable: Container[str] | None) -> bool:
        """It came to the pool, or its image has left host memory."""
        if self._memory.residency.get(digest) is not None:
            return True
        return loadable is not None and digest not in loadable

    def _forget_stale(self, loadable: Container[str] | None) -> None:
        """Those that never come to the top, so that they cannot pile up."""
        if len(self._guesses) <= self._num_remembered:
            return
        for digest in [d for d in self._guesses if self._is_stale(d, loadable)]:
            self._drop_guess(digest)
        self._num_remembered = 2 * len(self._guesses) + _MIN_GUESSES

    def _drop_guess(self, digest: str) -> None:
        guess = self._guesses.pop(digest, None)
        if guess is not None:
            del self._by_worth[bisect.bisect_left(self._by_worth, (guess[0], digest))]
