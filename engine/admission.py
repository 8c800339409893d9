"""Starting waiting requests: does one get all that it needs now, and if not, what does it lack? Pure.

Knows nothing of order and fairness, which are the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Container
from enum import Enum

from engine.copy_clock import CopyClock
from engine.memory import Needed, PoolMemory
from engine.plan import AdapterLoad
from engine.prefetch import Prefetch, Reason
from engine.residency import ResidentAdapter
from engine.sequence import Sequence


class Lack(Enum):
    IMAGE = "image"  # its adapter is not in host memory
    COPY = "copy"  # its adapter's weights would keep the step waiting
    SLOT = "slot"
    PAGES = "pages"


class Admission:
    """One pass over the waiting requests, oldest first. What can be had only shrinks during a pass."""

    def __init__(
        self,
        memory: PoolMemory,
        copies: CopyClock,
        queued: Container[str],
        loadable: Container[str] | None,
        now: float,
        starts_at: float,
    ) -> None:
        """`queued`: digests that waiting requests need; `loadable`: those in host memory, None: all.

        `starts_at`: when the device comes to this step; weights that arrive later would keep it waiting.
        """
        self.loads: list[AdapterLoad] = []
        self.missing: set[str] = set()
        self.protected: set[str] = set()  # idle adapters of requests that lack pages or the end of a copy
        self._memory = memory
        self._copies = copies
        self._starts_at = starts_at
        self._queued = queued
        self._loadable = loadable
        self._now = now
        self._slots_are_gone = False

    def start(self, seq: Sequence, num_spare_pages: int = 0) -> Lack | None:
        """Give a request everything that its prompt needs, or change nothing and say what it lacks.

        `num_spare_pages`: must be left for those that run.
        """
        memory = self._memory
        adapter = memory.residency.get(seq.digest) if seq.digest else None
        if adapter is not None and adapter.ready_at > self._starts_at:
            self.protected.add(adapter.digest)
            return Lack.COPY
        cold = seq.digest if adapter is None else None
        if cold and (lack := self._lack_of_cold(cold)):
            return lack
        # one token at least is computed, to have logits
        nodes = memory.prefix.match(seq.namespace, seq.token_ids, len(seq.token_ids) - 1)
        # one token beyond the prompt, so that a full pool does not preempt the newcomer in its next step
        num_pages = memory.pages_for(len(seq.token_ids) + 1) - len(nodes)
        num_adapter_pages = seq.num_adapter_pages if cold else 0
        # what the request itself is going to use is not there to be evicted
        needed = Needed(self.protected | {seq.namespace}, self._queued)
        num_wanted = num_pages + num_adapter_pages + num_spare_pages
        if not memory.can_take(num_wanted, needed, keeping=nodes):
            self.protected.add(seq.namespace)
            return Lack.PAGES
        memory.prefix.acquire(nodes)
        if cold:
            assert not nodes, "a prefix goes before its adapter"
            adapter = self._load(cold, num_adapter_pages, needed)
            if adapter.ready_at > self._starts_at:
                self.protected.add(cold)
                return Lack.COPY
        if adapter is not None:
            memory.residency.acquire(adapter.digest)
        seq.start(nodes, memory.take(seq.owner, num_pages, needed), memory.page_tokens)
        return None

    def load_pinned(self) -> None:
        """Pinned adapters that are not there yet, as far as there is room for them now."""
        for digest, num_pages in self._memory.residency.absent_pinned.items():
            needed = Needed(self.protected, self._queued)
            if self._lack_of_cold(digest) is None and self._memory.can_take(num_pages, needed):
                self._load(digest, num_pages, needed)

    def load_ahead(self, prefetch: Prefetch) -> None:
        """Before any request has asked for it."""
        needed = Needed(self.protected, self._queued)
        if prefetch.reason is Reason.POPULARITY:
            self._memory.free_cheapest(prefetch.num_pages)
        self._load(prefetch.digest, prefetch.num_pages, needed, is_ahead=True)

    def _load(self, digest: str, num_pages: int, needed: Needed, is_ahead: bool = False) -> ResidentAdapter:
        adapter = self._memory.load_adapter(digest, num_pages, needed, self._now, is_ahead)
        after_steps = self._memory.is_busy(adapter.page_ids)
        begins_at = self._starts_at if after_steps and self._starts_at < math.inf else self._now
        adapter.ready_at = self._copies.add(num_pages, begins_at)
        self.loads.append(AdapterLoad(digest, adapter.slot, adapter.page_ids, after_steps))
        return adapter

    def _lack_of_cold(self, digest: str) -> Lack | None:
        if self._loadable is not None and digest not in self._loadable:
            self.missing.add(digest)
            return Lack.IMAGE
        # where nobody runs, one of them waits inside the step
        may_wait = self._starts_at == math.inf and not self.loads
        if not may_wait and self._copies.is_backed_up(self._now):
            return Lack.COPY
        if not self._slots_are_gone:
            self._slots_are_gone = not self._memory.has_slot(Needed(self.protected, self._queued))
        return Lack.SLOT if self._slots_are_gone else None
