"""What ended a moment ago: somebody who asks for it may have been on his way already. Pure."""

from __future__ import annotations

from collections.abc import Hashable

LATE_S = 15.0
"""Longer than a router lets a request wait, unless it is told otherwise, and than a hint is believed."""


class Latecomers:
    """Times passed in never go back."""

    def __init__(self, late_s: float = LATE_S) -> None:
        self._late_s = late_s
        self._until: dict[Hashable, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until)

    def expect(self, what: Hashable, now: float) -> None:
        """It has ended."""
        self._forget(now)
        self._until.pop(what, None)  # so that the oldest stays first
        self._until[what] = now + self._late_s

    def discard(self, what: Hashable) -> None:
        """It has begun again."""
        self._until.pop(what, None)

    def is_late(self, what: Hashable, now: float) -> bool:
        """Who asks for it now."""
        return self._until.get(what, now) > now

    def _forget(self, now: float) -> None:
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
