"""Who goes next where requests wait for a place in the fleet. Pure.

Adapters take turns, each with its requests in order of arrival: one that asks for much waits behind itself,
and keeps an adapter that asks for little waiting for one round at most.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # the next one first; none is empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def num_adapters(self) -> int:
        return len(self._queues)

    def add(self, adapter: str, item: T) -> None:
        self._queues.setdefault(adapter, deque()).append(item)
        self._size += 1

    def next(self) -> T:
        adapter, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[adapter] = queue  # behind all others
        self._size -= 1
        return item

    def ahead(self, count: int) -> Iterator[T]:
        """Who goes next of each of so many adapters, in order. Nothing may be added or taken meanwhile."""
        return (queue[0] for queue in islice(self._queues.values(), count))

    def discard(self, adapter: str, item: T) -> None:
        """It waits no longer; nothing happens if it does not wait."""
        queue = self._queues.get(adapter)
        if queue is None or item not in queue:
            return
        queue.remove(item)
        if not queue:
            del self._queues[adapter]
        self._size -= 1
