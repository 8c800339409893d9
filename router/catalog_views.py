"""Who follows the catalog, and how much of it they have seen: a change is over when all who live have."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Set
from dataclasses import dataclass

logger = logging.getLogger(__name__)

POLL_S = 5.0
SEEN_TIMEOUT_S = 2.0  # a view that does not answer for so long is waited for no more
MAX_LOGGED = 1000  # changes; a view that has missed more is told everything


@dataclass(slots=True)
class _View:
    version: int
    heard: float


class Views:
    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex  # versions of two catalogs do not compare
        self.version = 0
        self._log: deque[Set[str]] = deque(maxlen=MAX_LOGGED)  # names that changed, one set a version
        self._changed = asyncio.Condition()
        self._views: dict[str, _View] = {}

    def renew(self) -> None:
        """Whoever asks next is told everything."""
        self.epoch = uuid.uuid4().hex

    async def advance(self, names: Set[str]) -> None:
        """These have changed, come or gone."""
        self.version += 1
        self._log.append(names)
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, view: str, epoch: str, version: int) -> Set[str] | None:
        """For a version after the one that the view names as seen, at most `POLL_S`.

        What has changed since that one; None: it cannot be told any more.
        """
        seen = version if epoch == self.epoch else -1
        self._views[view] = _View(seen, time.monotonic())
        async with self._changed:
            self._changed.notify_all()  # somebody may wait for this view
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait_for(lambda: self.version > seen)
            except TimeoutError:
                pass
        missed = self.version - seen
        if epoch != self.epoch or missed > len(self._log):
            return None
        return frozenset().union(*list(self._log)[len(self._log) - missed :])

    async def until_seen(self) -> None:
        version = self.version
        async with self._changed:
            try:
                async with asyncio.timeout(SEEN_TIMEOUT_S):
                    await self._changed.wait_for(lambda: self._oldest_seen() >= version)
            except TimeoutError:
                logger.warning("a view of the catalog does not answer")

    def _oldest_seen(self) -> int:
        dead_before = time.monotonic() - POLL_S - SEEN_TIMEOUT_S
        self._views = {name: view for name, view in self._views.items() if view.heard > dead_before}
        return min((view.version for view in self._views.values()), default=self.version)
