"""One pool, three owners: who yields a page when none is free. Pure: no tensors, no clock.

The cheapest owner yields first: an unused prefix leaf or an idle adapter, whichever is worth less a page (see
`engine.eviction`). An adapter's prefix KV goes before the adapter, since without the adapter nobody can use
it. Leased and pinned adapters and pages in use never yield.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence, Set
from enum import Enum
from typing import NamedTuple

from engine.eviction import EvictionOrder
from engine.page_pool import PREFIX_OWNER, Owner, PageKind, PagePool
from engine.prefix_cache import PrefixCache, PrefixNode
from engine.residency import AdapterResidency, ResidentAdapter


class EvictionCause(Enum):
    PAGES = "pages"  # somebody needed pages
    SLOT = "slot"  # another adapter needed the slot
    UNUSED = "unused"  # it was copied ahead of requests, and none came
    UNLOADED = "unloaded"  # asked for by the operator, or replaced by a newer version


class Eviction(NamedTuple):
    digest: str
    slot: int
    page_ids: tuple[int, ...]
    cause: EvictionCause


class Needed(NamedTuple):
    """Adapters that waiting requests need. `older`: of requests ahead of the one that asks; never evicted."""

    older: Set[str] = frozenset()
    any: Container[str] = ()


class PoolMemory:
    def __init__(
        self, num_pages: int, page_tokens: int, num_slots: int, order: EvictionOrder | None = None
    ) -> None:
        self.page_tokens = page_tokens
        self.pool = PagePool(num_pages)
        self.prefix = PrefixCache(page_tokens)
        self.order = order or EvictionOrder()
        self.residency = AdapterResidency(num_slots, self.order)
        self._freed: list[int] = []
        self._planned_at = -math.inf  # when the last step was planned
        self._busy: set[int] = set()  # pages freed since then that this step may touch
        self._evictions: list[Eviction] = []

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def can_take(self, num_pages: int, needed: Needed, keeping: Sequence[PrefixNode] = ()) -> bool:
        """Whether so many pages can be had right now by evicting, `keeping` not among them."""
        if self.pool.can_allocate(num_pages):
            return True
        num_idle = self.residency.num_idle_pages - sum(
            len(a.page_ids) for d in needed.older if (a := self.residency.get(d)) is not None and a.is_idle
        )
        num_kept = sum(n.num_users == 0 for n in keeping)
        return num_pages <= self.pool.num_free + num_idle + self.prefix.num_evictable - num_kept

    def take(self, owner: Owner, num_pages: int, needed: Needed) -> tuple[int, ...]:
        """Allocate, evicting as much as it takes. Only after `can_take`: it cannot fail."""
        while not self.pool.can_allocate(num_pages):
            self._evict_cheapest(needed)
        return self.pool.allocate(owner, num_pages)

    def give_back(self, owner: Owner, page_ids: tuple[int, ...], last_used: float = math.inf) -> None:
        self.pool.free(owner, page_ids)
        self._freed.extend(page_ids)
        if last_used >= self._planned_at:
            self._busy.update(page_ids)

    def is_busy(self, page_ids: tuple[int, ...]) -> bool:
        """Whether a step in flight may touch one of these pages, which are another owner's by now."""
        return not self._busy.isdisjoint(page_ids)

    def share(
        self,
        owner: Owner,
        namespace: str,
        parent: PrefixNode | None,
        tokens: tuple[int, ...],
        page_id: int,
    ) -> PrefixNode:
        """Move a full page of `owner` to the prefix cache and use it from there.

        If the cache holds these tokens already, the caller gets that page and its own one is freed.
        """
        node = self.prefix.insert(namespace, parent, tokens, page_id)
        if node.page_id == page_id:
            self.pool.transfer(page_id, owner, PREFIX_OWNER)
        else:
            self.give_back(owner, (page_id,))
        return node

    def has_slot(self, needed: Needed) -> bool:
        """Whether an adapter slot can be had right now by evicting."""
        return self.residency.has_free_slot or any(True for _ in self._evictable(needed))

    def has_cheaper(self, num_pages: int, worth: float) -> bool:
        """Whether so many pages are free, or hold prefixes that are worth less."""
        num_missing = num_pages - self.pool.num_free
        if num_missing <= 0:
            return True
        last_used = self.prefix.new_last_used(num_missing)
        return last_used is not None and self.order.prefix_page(last_used, self.prefix.new_reuse) < worth

    def free_cheapest(self, num_pages: int) -> None:
        """Evict prefixes until so many pages are free. Only after `has_cheaper`."""
        while not self.pool.can_allocate(num_pages):
            cheapest = self.prefix.cheapest_leaf(self.order.prefix_page)
            assert cheapest is not None
            leaf = cheapest[1]
            self._free_prefix_pages([self.prefix.evict(leaf)], leaf.last_used)

    def load_adapter(
        self, digest: str, num_pages: int, needed: Needed, now: float, is_ahead: bool = False
    ) -> ResidentAdapter:
        """Pages and a slot for an adapter, evicting others. Only after `has_slot` and `can_take`.

        `is_ahead`: no request has asked for it. The caller sets `ready_at` if the copy takes time.
        """
        if not self.residency.has_free_slot:
            victim = self._cheapest_adapter(needed)
            assert victim is not None
            self.evict_adapter(victim.digest, EvictionCause.SLOT)
        page_ids = self.take(Owner(PageKind.ADAPTER, digest), num_pages, needed)
        return self.residency.insert(digest, page_ids, now, is_ahead)

    def evict_adapter(self, digest: str, cause: EvictionCause) -> None:
        """With the prefix KV that only its requests could use. The adapter must be idle."""
        adapter = self.residency.evict(digest)
        if adapter.is_ahead and cause is not EvictionCause.UNLOADED:
            cause = EvictionCause.UNUSED
        # nobody has used its prefix later than the adapter itself
        self._free_prefix_pages(self.prefix.evict_namespace(digest), adapter.last_used)
        self.give_back(Owner(PageKind.ADAPTER, digest), adapter.page_ids, adapter.last_used)
        self._evictions.append(Eviction(digest, adapter.slot, adapter.page_ids, cause))

    def drain_changes(self, now: float) -> tuple[tuple[Eviction, ...], tuple[int, ...]]:
        """Evictions and freed pages since the last call, for the step that is planned now."""
        changes = tuple(self._evictions), tuple(self._freed)
        self._evictions, self._freed = [], []
        self._planned_at = now
        self._busy.clear()
        return changes

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.prefix.check_invariants()
        self.residency.check_invariants()
        assert self.pool.num_used(PageKind.PREFIX) == self.prefix.num_pages
        orphans = {n for n in self.prefix.namespaces if n and self.residency.get(n) is None}
        assert not orphans, "prefix KV that no request can use"
        for adapter in self.residency:
            owner = Owner(PageKind.ADAPTER, adapter.digest)
            assert self.pool.pages_of(owner) == frozenset(adapter.page_ids)
        adapter_pages = sum(len(a.page_ids) for a in self.residency)
        assert self.pool.num_used(PageKind.ADAPTER) == adapter_pages

    def _evictable(self, needed: Needed) -> Iterator[ResidentAdapter]:
        return (a for a in self.residency.idle() if a.digest not in needed.older)

    def _cheapest_adapter(self, needed: Needed) -> ResidentAdapter | None:
        """The one of the least worth, of those that nobody waits for if there are any.

        Next come those that the steps in flight may read: a copy to their pages would have to wait.
        """
        queued: ResidentAdapter | None = None
        busy: ResidentAdapter | None = None
        for adapter in self._evictable(needed):
            is_queued = adapter.digest in needed.any
            is_busy = self._is_busy(adapter)
            if queued if is_queued else is_busy and busy:
                continue
            if self.residency.revalue(adapter):
                return self._cheapest_adapter(needed)  # each round mends one worth
            if not is_queued and not is_busy:
                return adapter
            if is_queued:
                queued = adapter
            else:
                busy = adapter
        return busy or queued

    def _evict_cheapest(self, needed: Needed) -> None:
        cheapest = self.prefix.cheapest_leaf(self.order.prefix_page)
        leaf = cheapest[1] if cheapest else None
        adapter = self._cheapest_adapter(needed)
        if adapter is not None and (cheapest is None or self._yields_before(adapter, *cheapest, needed)):
            leaf = self.prefix.oldest_leaf(adapter.digest)
            if leaf is None:
                self.evict_adapter(adapter.digest, EvictionCause.PAGES)
                return
        assert leaf is not None, "the caller asks `can_take` first"
        self._free_prefix_pages([self.prefix.evict(leaf)], leaf.last_used)

    def _yields_before(
        self, adapter: ResidentAdapter, leaf_worth: float, leaf: PrefixNode, needed: Needed
    ) -> bool:
        if adapter.digest in needed.any:
            return False
        is_leaf_busy = leaf.last_used >= self._planned_at
        if is_leaf_busy != self._is_busy(adapter):
            return is_leaf_busy
        return adapter.worth < leaf_worth

    def _is_busy(self, adapter: ResidentAdapter) -> bool:
        """A step in flight may read it, or its copy may still be under way."""
        return max(adapter.last_used, adapter.ready_at) >= self._planned_at

    def _free_prefix_pages(self, page_ids: list[int], last_used: float) -> None:
        self.give_back(PREFIX_OWNER, tuple(page_ids), last_used)
