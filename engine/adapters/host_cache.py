"""Which adapter images stay in host memory: bounded by bytes, least recently used goes first.

Pure: knows digests and sizes; their owner keeps the images and says what must not go.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from engine.errors import AdapterRefused


class HostCache:
    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
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
        for other, size in self._sizes.items():
            if excess <= 0:
                break
            if other not in protected:
                victims.append(other)
                excess -= size
        if excess > 0:
            return None
        for victim in victims:
            self.remove(victim)
        self._sizes[digest] = nbytes
        self.used_bytes += nbytes
        return tuple(victims)

    def remove(self, digest: str) -> None:
        self.used_bytes -= self._sizes.pop(digest)

    def too_large(self, nbytes: int) -> AdapterRefused:
        """The refusal of an image that could not be held by an empty cache."""
        return AdapterRefused(
            f"the adapter needs {nbytes} bytes of host memory, host_cache_bytes is {self.capacity_bytes}",
            param="host_cache_bytes",
        )

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(self._sizes.values())
        assert self.used_bytes <= self.capacity_bytes
