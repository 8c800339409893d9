"""Which adapters are in the pool, in which slot, and who is using them. Pure: no tensors, no clock.

An adapter is known by the digest of its content, never by its name. A leased or pinned adapter is never
evicted, so nothing that runs can lose its weights.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass

from engine.eviction import EvictionOrder


@dataclass(slots=True)
class ResidentAdapter:
    digest: str
    slot: int  # row of the kernels' adapter table
    page_ids: tuple[int, ...]
    num_leases: int = 0  # running requests
    pinned: bool = False
    is_ahead: bool = False  # copied before a request asked for it, and none has yet
    ready_at: float = 0.0  # its weights are expected to be in the pool by then
    last_used: float = 0.0  # when it was loaded, or released by its last user
    worth: float = 0.0  # while it is idle; see `EvictionOrder`

    @property
    def is_idle(self) -> bool:
        return self.num_leases == 0 and not self.pinned


class AdapterResidency:
    """Times passed in never go back."""

    def __init__(self, num_slots: int, order: EvictionOrder | None = None) -> None:
        self.num_slots = num_slots
        self.num_idle_pages = 0
        self._order = order or EvictionOrder()
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._resident: dict[str, ResidentAdapter] = {}
        self._idle: list[tuple[float, str]] = []  # (worth, digest), sorted
        self._pinned: dict[str, int] = {}  # digest -> pages, resident or not
        self._num_absent = 0  # of these, not resident

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
    def num_leased_pages(self) -> int:
        """Of adapters that running requests use."""
        return sum(len(a.page_ids) for a in self._resident.values() if a.num_leases)

    @property
    def num_pinned_pages(self) -> int:
        """Of pinned adapters, also of those that are not resident yet."""
        return sum(self._pinned.values())

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    @property
    def absent_pinned(self) -> dict[str, int]:
        """Pinned adapters that are not resident, and their pages."""
        if not self._num_absent:
            return {}
        return {digest: pages for digest, pages in self._pinned.items() if digest not in self._resident}

    def pin(self, digest: str, num_pages: int) -> None:
        """Keep it from eviction from now on, or from when it is loaded on."""
        if digest in self._pinned:
            return
        self._pinned[digest] = num_pages
        adapter = self._resident.get(digest)
        if adapter is None:
            self._num_absent += 1
        else:
            self._leave_idle(adapter)
            adapter.pinned = True

    def unpin(self, digest: str) -> None:
        if self._pinned.pop(digest, None) is None:
            return
        adapter = self._resident.get(digest)
        if adapter is None:
            self._num_absent -= 1
        else:
            adapter.pinned = False
            self._enter_idle(adapter)

    def insert(
        self, digest: str, page_ids: tuple[int, ...], now: float, is_ahead: bool = False
    ) -> ResidentAdapter:
        assert digest not in self._resident, digest
        adapter = ResidentAdapter(digest, self._free_slots.pop(), page_ids, last_used=now)
        adapter.pinned = digest in self._pinned
        adapter.is_ahead = is_ahead
        self._num_absent -= adapter.pinned
        self._resident[digest] = adapter
        self._order.used(digest, now, count=0.0)
        self._enter_idle(adapter)
        return adapter

    def evict(self, digest: str) -> ResidentAdapter:
        """The caller frees its pages."""
        adapter = self._resident[digest]
        assert adapter.num_leases == 0, f"{digest} is in use"
        assert not adapter.pinned, f"{digest} is pinned"
        self._leave_idle(adapter)
        del self._resident[digest]
        self._free_slots.append(adapter.slot)
        return adapter

    def asked(self, digest: str) -> None:
        """A request for it is here: it is no longer ahead of all."""
        adapter = self._resident[digest]
        adapter.is_ahead = False
        self.revalue(adapter)

    def acquire(self, digest: str) -> None:
        adapter = self._resident[digest]
        self._leave_idle(adapter)
        adapter.num_leases += 1

    def release(self, digest: str, now: float) -> None:
        adapter = self._resident[digest]
        assert adapter.num_leases > 0
        adapter.num_leases -= 1
        adapter.last_used = now
        self._order.used(digest, now)
        self._enter_idle(adapter)

    def idle(self) -> Iterator[ResidentAdapter]:
        """Neither leased nor pinned, those of the least worth first."""
        return (self._resident[digest] for _, digest in self._idle)

    def revalue(self, adapter: ResidentAdapter) -> bool:
        """Whether an idle adapter's worth has changed: since it fell idle its image has left host memory, or
        it was asked for."""
        if not adapter.is_idle or self._worth(adapter) == adapter.worth:
            return False
        self._leave_idle(adapter)
        self._enter_idle(adapter)
        return True

    def _enter_idle(self, adapter: ResidentAdapter) -> None:
        if adapter.is_idle:
            adapter.worth = self._worth(adapter)
            bisect.insort(self._idle, (adapter.worth, adapter.digest))
            self.num_idle_pages += len(adapter.page_ids)

    def _worth(self, adapter: ResidentAdapter) -> float:
        worth = self._order.ahead_of_use if adapter.is_ahead else self._order.resident_adapter
        return worth(adapter.digest, len(adapter.page_ids))

    def _leave_idle(self, adapter: ResidentAdapter) -> None:
        if adapter.is_idle:
            del self._idle[bisect.bisect_left(self._idle, (adapter.worth, adapter.digest))]
            self.num_idle_pages -= len(adapter.page_ids)

    def check_invariants(self) -> None:
        slots = [a.slot for a in self]
        assert sorted(slots + self._free_slots) == list(range(self.num_slots))
        assert all(a.num_leases >= 0 for a in self)
        assert self._idle == sorted((a.worth, a.digest) for a in self if a.is_idle)
        assert self.num_idle_pages == sum(len(a.page_ids) for a in self if a.is_idle)
        assert {a.digest for a in self if a.pinned} == {a.digest for a in self if a.digest in self._pinned}
        assert self._num_absent == sum(digest not in self._resident for digest in self._pinned)
        assert all(self._pinned[a.digest] == len(a.page_ids) for a in self if a.pinned)
        pages = [p for a in self for p in a.page_ids]
        assert len(set(pages)) == len(pages), "two adapters share a page"
