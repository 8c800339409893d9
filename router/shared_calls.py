"""One call in flight for each key, shared by all who ask meanwhile. Knows nothing of what is called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SharedCalls(Generic[K, T]):
    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    async def get(self, key: K, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `call` returns or raises. One who leaves ends it for nobody else."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(call())
            task.add_done_callback(lambda task: self._ended(key, task))
        return await asyncio.shield(task)

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, also if everybody has left
