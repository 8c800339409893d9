"""Which adapter images stay in host memory: bounded by bytes, the one of least worth goes first.

Pure: knows digests and sizes; their owner keeps the images, says what they are worth and what must not go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Set


class HostCache:
    def __init__(self, capacity_bytes: int, worth: Callable[[str], float] | None = None) -> None:
        """`worth` of a digest, asked for when one must go: the least goes. None: the least recently used."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._worth = worth
        self._sizes: dict[str, int] = {}  # least recently used first

    def __contains__(self, digest: str) -> bool:
        return digest in self._sizes

    @property
    def digests(self) -> Collection[str]:
        """Least recently used first."""
        return self._sizes.keys()

    def touch(self, digest: str) -> None:
        """It was used just now."""
        self._sizes[digest] = self._sizes.pop(digest)

    def put(self, digest: str, nbytes: int, protected: Set[str]) -> tuple[str, ...] | None:
        """Make room for a new image and count it. Returns what had to go for it.

        None, and nothing changes, if what is not `protected` does not leave enough room.
        """
        assert digest not in self._sizes
        victims: list[str] = []
        excess = self.used_bytes + nbytes - self.capacity_bytes
        if excess > 0:
            for other in self._order(protected):
                victims.append(other)
                excess -= self._sizes[other]
                if excess <= 0:
                    break
        if excess > 0:
            return None
        for victim in victims:
            self.remove(victim)
        self._sizes[digest] = nbytes
        self.used_bytes += nbytes
        return tuple(victims)

    def remove(self, digest: str) -> None:
        self.used_bytes -= self._sizes.pop(digest)

    def _order(self, protected: Set[str]) -> Iterable[str]:
        """In which images go."""
        digests = (digest for digest in self._sizes if digest not in protected)
        return sorted(digests, key=self._worth) if self._worth else digests

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(self._sizes.values())
        assert self.used_bytes <= self.capacity_bytes
