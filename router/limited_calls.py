"""Calls of which a few are under way at a time, one for each key. Knows nothing of what is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class LimitedCalls(Generic[K]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: set[K] = set()  # under way

    async def run(self, keys: Iterable[K], call: Callable[[K], Coroutine[Any, Any, None]]) -> None:
        """For the first keys that are not under way, as far as there is room; returns when these calls end.

        What one of them raises ends the others.
        """
        room = self._limit - len(self._keys)
        begun = list(islice((key for key in keys if key not in self._keys), room))
        self._keys.update(begun)
        async with asyncio.TaskGroup() as group:
            for key in begun:
                # not in the call: one that is cancelled early never runs
                group.create_task(call(key)).add_done_callback(partial(self._ended, key))

    def _ended(self, key: K, task: asyncio.Task[None]) -> None:
        self._keys.remove(key)
