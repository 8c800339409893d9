"""Who follows the catalog, and how much of it they have seen: a change is over when all who live have."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

logger = logging.getLogger(__name__)

POLL_S = 5.0
SEEN_TIMEOUT_S = 2.0  # a view that does not answer for so long is waited for no more


@dataclass(slots=True)
class _View:
    version: int
    heard: float


class Views:
    def __init__(self) -> None:
        self.epoch = uuid.uuid4().hex  # versions of two catalogs do not compare
        self.version = 0
        self._changed = asyncio.Condition()
        self._views: dict[str, _View] = {}

    async def advance(self) -> None:
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, view: str, epoch: str, version: int) -> None:
        """For a version after the one that the view names as seen, at most `POLL_S`."""
        seen = version if epoch == self.epoch else -1
        self._views[view] = _View(seen, time.monotonic())
        async with self._changed:
            self._changed.notify_all()  # somebody may wait for this view
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait_for(lambda: self.version > seen)
            except TimeoutError:
                pass

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
