"""Which adapters are in the pool, in which slot, and who is using them. Pure: no tensors, no clock.

An adapter is known by the digest of its content, never by its name. A leased or pinned adapter is never
evicted, so nothing that runs can lose its weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class ResidentAdapter:
    digest: str
    slot: int  # row of the kernels' adapter table
    page_ids: tuple[int, ...]
    num_leases: int = 0  # running requests
    pinned: bool = False
    ready_at: float = 0.0  # its weights are expected to be in the pool by then
    last_used: float = 0.0  # when it was loaded, or released by its last user


class AdapterResidency:
    """Times passed in never go back."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._resident: dict[str, ResidentAdapter] = {}
        self._unleased: OrderedDict[str, ResidentAdapter] = OrderedDict()  # by last use

    def __iter__(self) -> Iterator[ResidentAdapter]:
        return iter(self._resident.values())

    def __len__(self) -> int:
        return len(self._resident)

    def get(self, digest: str) -> ResidentAdapter | None:
        return self._resident.get(digest)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_pinned_pages(self) -> int:
        return sum(len(a.page_ids) for a in self if a.pinned)

    def insert(self, digest: str, page_ids: tuple[int, ...], now: float) -> ResidentAdapter:
        assert digest not in self._resident, digest
        adapter = ResidentAdapter(digest, self._free_slots.pop(), page_ids, last_used=now)
        self._resident[digest] = self._unleased[digest] = adapter
        return adapter

    def evict(self, digest: str) -> ResidentAdapter:
        """The caller frees its pages."""
        adapter = self._resident[digest]
        assert adapter.num_leases == 0, f"{digest} is in use"
        assert not adapter.pinned, f"{digest} is pinned"
        del self._resident[digest], self._unleased[digest]
        self._free_slots.append(adapter.slot)
        return adapter

    def acquire(self, digest: str) -> None:
        adapter = self._resident[digest]
        adapter.num_leases += 1
        self._unleased.pop(digest, None)

    def release(self, digest: str, now: float) -> None:
        adapter = self._resident[digest]
        assert adapter.num_leases > 0
        adapter.num_leases -= 1
        adapter.last_used = now
        if adapter.num_leases == 0:
            self._unleased[digest] = adapter

    def idle(self) -> Iterator[ResidentAdapter]:
        """Neither leased nor pinned, the one used longest ago first."""
        return (a for a in self._unleased.values() if not a.pinned)

    def check_invariants(self) -> None:
        slots = [a.slot for a in self]
        assert sorted(slots + self._free_slots) == list(range(self.num_slots))
        assert all(a.num_leases >= 0 for a in self)
        assert {a.digest for a in self if a.num_leases == 0} == set(self._unleased)
        times = [a.last_used for a in self._unleased.values()]
        assert times == sorted(times)
        pages = [p for a in self for p in a.page_ids]
        assert len(set(pages)) == len(pages), "two adapters share a page"
