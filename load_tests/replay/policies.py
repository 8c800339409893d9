"""Who yields pages: ours, and what others do, over the same pool, scheduler and tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.eviction import EvictionOrder
from engine.memory import EvictionCause, Needed, PoolMemory
from engine.page_pool import Owner, PageKind
from engine.prefix_cache import PrefixNode
from engine.residency import ResidentAdapter

PAGE_TOKENS = 16
HINT_S = 0.05  # as a router's hint may be ahead of the request


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    build: Callable[[int, int, int], PoolMemory]  # pages, slots, pages of the largest adapter
    drops_idle: bool = False  # S-LoRA: whenever a request ends, what nobody runs or waits for goes
    prefetch: bool = False  # by popularity
    hint_s: float | None = None  # so long before a request arrives its adapter is hinted


class StaticArea(PoolMemory):
    """A share of the pool is for adapters only, the rest for KV only; least recently used goes first."""

    def __init__(self, share: float, num_pages: int, num_slots: int, largest: int) -> None:
        super().__init__(num_pages, PAGE_TOKENS, num_slots, EvictionOrder("lru"))
        self._area = int(num_pages * share)
        self._largest = largest

    def can_take(self, num_pages: int, needed: Needed, keeping: Sequence[PrefixNode] = ()) -> bool:
        """For KV. The pages of a cold adapter are asked for as well: KV is never that scarce here."""
        num_kept = sum(node.num_users == 0 for node in keeping)
        return num_pages <= self._kv_room + self.prefix.num_evictable - num_kept

    def has_slot(self, needed: Needed) -> bool:
        older = (self.residency.get(digest) for digest in needed.older)
        num_idle = self.residency.num_idle_pages - sum(len(a.page_ids) for a in older if a and a.is_idle)
        return super().has_slot(needed) and self._adapter_room + num_idle >= self._largest

    def take(self, owner: Owner, num_pages: int, needed: Needed) -> tuple[int, ...]:
        if owner.kind is PageKind.ADAPTER:
            while num_pages > self._adapter_room:
                victim = self._cheapest_adapter(needed)
                assert victim is not None
                self.evict_adapter(victim.digest, EvictionCause.PAGES)
        while owner.kind is not PageKind.ADAPTER and num_pages > self._kv_room:
            leaf = self.prefix.oldest_evictable()
            assert leaf is not None
            self._free_prefix_pages([self.prefix.evict(leaf)], leaf.last_used)
        return self.pool.allocate(owner, num_pages)

    @property
    def _adapter_room(self) -> int:
        return self._area - self.pool.num_used(PageKind.ADAPTER)

    @property
    def _kv_room(self) -> int:
        used = self.pool.num_used(PageKind.SEQUENCE) + self.pool.num_used(PageKind.PREFIX)
        return self.pool.num_pages - self._area - used


class ChameleonOrder(EvictionOrder):
    """Remembers what Chameleon's score needs; prefix pages and host memory go by last use."""

    def __init__(self) -> None:
        super().__init__("lru")
        self.counts: dict[str, int] = {}
        self.times: dict[str, float] = {}

    def used(self, digest: str, now: float, count: float = 1.0) -> None:
        super().used(digest, now, count)
        self.counts[digest] = self.counts.get(digest, 0) + 1
        self.times[digest] = now


class Chameleon(PoolMemory):
    """0.45 frequency + 0.10 recency + 0.45 size, each over the largest of the idle adapters (Iliakopoulou et
    al., 2024). Adapters yield to each other and to KV after all prefix pages that are older."""

    def __init__(self, num_pages: int, num_slots: int, largest: int) -> None:
        self._memory_of = ChameleonOrder()
        super().__init__(num_pages, PAGE_TOKENS, num_slots, self._memory_of)

    def _cheapest_adapter(self, needed: Needed) -> ResidentAdapter | None:
        idle = list(self._evictable(needed))
        idle = [a for a in idle if a.digest not in needed.any] or idle
        if not idle:
            return None
        counts, times = self._memory_of.counts, self._memory_of.times
        most = max(counts[a.digest] for a in idle)
        newest = max(times[a.digest] for a in idle)
        span = newest - min(times[a.digest] for a in idle) or 1.0
        largest = max(len(a.page_ids) for a in idle)
        return min(
            idle,
            key=lambda a: (
                0.45 * counts[a.digest] / most
                + 0.10 * (1.0 - (newest - times[a.digest]) / span)
                + 0.45 * len(a.page_ids) / largest
            ),
        )


def _unified(policy: str, num_pages: int, num_slots: int, largest: int) -> PoolMemory:
    order = EvictionOrder("score" if policy == "score" else "lru")
    return PoolMemory(num_pages, PAGE_TOKENS, num_slots, order)


OURS = Policy("ours", partial(_unified, "score"), prefetch=True)
POLICIES = (
    OURS,
    Policy("ours, no prefetch", partial(_unified, "score")),
    Policy("ours, hints", partial(_unified, "score"), prefetch=True, hint_s=HINT_S),
    Policy("LRU", partial(_unified, "lru")),
    Policy("Chameleon's score", Chameleon),
    *(Policy(f"static {share:.0%}", partial(StaticArea, share)) for share in (0.10, 0.25, 0.50)),
    Policy("evict when idle", partial(_unified, "lru"), drops_idle=True),
)
