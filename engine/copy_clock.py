"""When copies of adapters to the device will be done, from their measured rate. Pure; an estimate.

It only decides what is scheduled when: the device itself waits for the copies that a step needs.
"""

from __future__ import annotations

MOST_BACKLOG_S = 0.008
"""Copies are queued for so long at most: issuing them costs time of the step loop, and who comes first may
change."""


class CopyClock:
    def __init__(self, seconds_per_page: float) -> None:
        self._seconds_per_page = seconds_per_page
        self._done_at = 0.0

    def is_backed_up(self, now: float) -> bool:
        return self._done_at - now > MOST_BACKLOG_S

    def is_idle(self, now: float) -> bool:
        return self._done_at <= now

    def add(self, num_pages: int, now: float) -> float:
        """Queue a copy; returns when it will be done."""
        self._done_at = max(self._done_at, now) + num_pages * self._seconds_per_page
        return self._done_at
