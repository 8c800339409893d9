"""Which adapter images stay in host memory: bounded by bytes, the one of least worth goes first.

Pure: knows digests and sizes; their owner keeps the images, says what they are worth and what must not go.
Uses only raise a worth, so a heap of the worths that were seen last finds the least one: an image that comes
up and is worth more by now goes back to where it belongs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Set
from typing import NamedTuple


class _Place(NamedTuple):
    """In the order in which images go. Of equals the least recently used goes first."""

    worth: float  # when it was looked at
    used: int
    digest: str


class HostCache:
    def __init__(self, capacity_bytes: int, worth: Callable[[str], float] | None = None) -> None:
        """`worth` of a digest: the least goes; one that falls is noticed late. None: least recently used."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._worth = worth or (lambda digest: 0.0)
        self._sizes: dict[str, int] = {}
        self._used: dict[str, int] = {}  # when, in uses
        self._num_uses = itertools.count()
        self._places: dict[str, _Place] = {}
        self._heap: list[_Place] = []  # these, and some of before

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    @property
    def digests(self) -> Collection[str]:
        return self._sizes.keys()

    def touch(self, digest: str) -> None:
        """It was used just now."""
        self._used[digest] = next(self._num_uses)

    def put(self, digest: str, nbytes: int, protected: Set[str]) -> tuple[str, ...] | None:
        """Make room for a new image and count it. Returns what had to go for it.

        None, and nothing changes, if what is not `protected` does not leave enough room.
        """
        assert digest not in self._sizes
        victims = self._find_room(self.used_bytes + nbytes - self.capacity_bytes, protected)
        if victims is None:
            return None
        for victim in victims:
            self.remove(victim)
        self._sizes[digest] = nbytes
        self.used_bytes += nbytes
        self.touch(digest)
        self._enter(_Place(-math.inf, self._used[digest], digest))  # looked at when one must go
        if len(self._heap) > 64 + 2 * len(self._places):
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)
        return tuple(victims)

    def remove(self, digest: str) -> None:
        self.used_bytes -= self._sizes.pop(digest)
        del self._used[digest], self._places[digest]

    def _find_room(self, excess: int, protected: Set[str]) -> list[str] | None:
        """Who has to go for so many bytes; None: there are not as many."""
        victims: list[str] = []
        seen: list[_Place] = []
        while excess > 0 and self._heap:
            place = heapq.heappop(self._heap)
            digest = place.digest
            if self._places.get(digest) is not place:
                continue  # it was removed
            now = _Place(self._worth(digest), self._used[digest], digest)
            if place != now:
                self._enter(now)
                continue
            seen.append(place)
            if digest not in protected:
                victims.append(digest)
                excess -= self._sizes[digest]
        for place in seen:
            heapq.heappush(self._heap, place)
        return victims if excess <= 0 else None

    def _enter(self, place: _Place) -> None:
        self._places[place.digest] = place
        heapq.heappush(self._heap, place)

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(self._sizes.values())
        assert self.used_bytes <= self.capacity_bytes
        assert self._sizes.keys() == self._used.keys() == self._places.keys()
        assert all(self._heap[(i - 1) // 2] <= place for i, place in enumerate(self._heap) if i)
        in_heap = {id(place) for place in self._heap}
        assert all(id(place) in in_heap for place in self._places.values())
