from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from engine.eviction import EvictionOrder, Policy, ReloadCosts
from engine.memory import EvictionCause, Needed, PoolMemory
from engine.page_pool import Owner, PageKind
from engine.prefix_cache import PrefixNode

PAGE = 4
NUM_PAGES = 16
ADAPTER_PAGES = {"a": 1, "b": 2, "c": 4, "d": 3}
NOBODY = Needed()


HALF_LIFE_S = 8.0
COSTS = ReloadCosts(copy_page_s=1.0, copy_s=3.0, read_page_s=4.0, read_s=20.0, prefill_page_s=2.0)


@dataclass(slots=True)
class NaiveAdapter:
    num_pages: int
    num_leases: int = 0


@dataclass(slots=True)
class NaivePrefix:
    """One chain of pages, used and released as a whole."""

    namespace: str
    num_pages: int
    in_use: bool
    last_used: float = 0.0


@dataclass(slots=True)
class NaiveMemory:
    """Numbers of pages; who yields next is found by looking at everyone."""

    num_slots: int
    policy: Policy
    in_host: set[str]
    num_inserted: int = 0
    planned_at: float = -math.inf
    num_free: int = NUM_PAGES
    adapters: dict[str, NaiveAdapter] = field(default_factory=dict)
    prefixes: list[NaivePrefix] = field(default_factory=list)
    evicted: list[tuple[str, EvictionCause]] = field(default_factory=list)
    uses: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # digest -> (time, how many)

    def use(self, digest: str, now: float, count: float) -> None:
        known = self.uses.setdefault(digest, [(now, 1.0)] if count == 0.0 else [])
        known.append((now, count))

    def worth(self, digest: str) -> float:
        if self.policy == "lru":
            return self.uses[digest][-1][0]
        num_pages = self.adapters[digest].num_pages
        seconds = num_pages + 3.0 if digest in self.in_host else 4.0 * num_pages + 20.0
        uses = sum(count * 2.0 ** (time / HALF_LIFE_S) for time, count in self.uses[digest])
        return math.log2(uses * seconds / num_pages)

    def worth_of_prefix(self, prefix: NaivePrefix) -> float:
        if self.policy == "lru":
            return prefix.last_used
        reuse = 1.0 / (1.0 + self.num_inserted)  # nothing is used again here
        return math.log2(2.0 ** (prefix.last_used / HALF_LIFE_S) * COSTS.prefill_page_s * reuse)

    def idle(self, needed: Needed) -> list[str]:
        """Cheapest first; behind them those that the step in flight may read, then the queued ones."""
        idle = [d for d, a in self.adapters.items() if a.num_leases == 0 and d not in needed.older]

        def key(digest: str) -> tuple[bool, bool, float, str]:
            is_queued = digest in needed.any
            is_busy = self.last_used(digest) >= self.planned_at
            return is_queued, is_busy and not is_queued, round(self.worth(digest), 9), digest

        return sorted(idle, key=key)

    def last_used(self, digest: str) -> float:
        return self.uses[digest][-1][0]

    def oldest_prefix(self, namespace: str | None = None) -> NaivePrefix | None:
        unused = [p for p in self.prefixes if not p.in_use and namespace in (None, p.namespace)]
        return min(unused, key=lambda p: p.last_used, default=None)

    def evict(self, digest: str, cause: EvictionCause) -> None:
        self.num_free += self.adapters.pop(digest).num_pages
        self.num_free += sum(p.num_pages for p in self.prefixes if p.namespace == digest)
        self.prefixes = [p for p in self.prefixes if p.namespace != digest]
        self.evicted.append((digest, cause))

    def evict_cheapest(self, needed: Needed) -> bool:
        prefix = self.oldest_prefix()
        digest = next(iter(self.idle(needed)), None)
        # a queued adapter goes after every prefix; another one if it is worth less than all of them
        if digest and (prefix is None or self.yields_before(digest, prefix, needed)):
            prefix = self.oldest_prefix(digest)
            if prefix is None:
                self.evict(digest, EvictionCause.PAGES)
                return True
        if prefix:
            prefix.num_pages -= 1
            self.num_free += 1
            if prefix.num_pages == 0:
                self.prefixes.remove(prefix)
        return prefix is not None

    def yields_before(self, digest: str, prefix: NaivePrefix, needed: Needed) -> bool:
        if digest in needed.any:
            return False
        is_busy = self.last_used(digest) >= self.planned_at
        if is_busy != (prefix.last_used >= self.planned_at):
            return not is_busy
        return self.worth(digest) + 1e-9 < self.worth_of_prefix(prefix)

    def take(self, num_pages: int, needed: Needed) -> bool:
        while self.num_free < num_pages:
            if not self.evict_cheapest(needed):
                return False
        self.num_free -= num_pages
        return True


class Comparison:
    def __init__(self, seed: int, policy: Policy) -> None:
        self.rng = random.Random(seed)
        num_slots = self.rng.randint(1, 3)
        in_host: set[str] = set()
        order = EvictionOrder(policy, HALF_LIFE_S, COSTS, in_host)
        self.memory = PoolMemory(NUM_PAGES, PAGE, num_slots, order)
        self.naive = NaiveMemory(num_slots, policy, in_host)
        self.now = 0.0
        self.tickets = itertools.count()
        self.requests: list[tuple[str, list[PrefixNode], NaivePrefix]] = []

    def needed(self) -> Needed:
        digests = list(ADAPTER_PAGES)
        return Needed(
            older=frozenset(self.rng.sample(digests, self.rng.choice((0, 0, 1)))),
            any=frozenset(self.rng.sample(digests, self.rng.choice((0, 1, 2)))),
        )

    def load(self) -> None:
        digest, needed = self.rng.choice(list(ADAPTER_PAGES)), self.needed()
        if digest in self.naive.adapters:
            return
        has_slot = len(self.naive.adapters) < self.naive.num_slots or bool(self.naive.idle(needed))
        assert self.memory.has_slot(needed) == has_slot
        if not (has_slot and self.check_can_take(ADAPTER_PAGES[digest], needed)):
            return
        self.naive.in_host.add(digest)
        self.memory.load_adapter(digest, ADAPTER_PAGES[digest], needed, self.now)
        if len(self.naive.adapters) == self.naive.num_slots:
            self.naive.evict(self.naive.idle(needed)[0], EvictionCause.SLOT)
        assert self.naive.take(ADAPTER_PAGES[digest], needed)
        self.naive.adapters[digest] = NaiveAdapter(ADAPTER_PAGES[digest])
        self.naive.use(digest, self.now, 0.0)

    def start(self) -> None:
        """A request that leaves all its pages in the prefix cache; its tokens are like no other's."""
        namespace, needed = self.rng.choice(["", *self.naive.adapters]), self.needed()
        if namespace:
            self.memory.residency.acquire(namespace)
            self.naive.adapters[namespace].num_leases += 1
        num_pages = self.rng.randint(1, 5)
        if self.check_can_take(num_pages, needed):
            owner = Owner(PageKind.SEQUENCE, f"r{next(self.tickets)}")
            nodes: list[PrefixNode] = []
            for page_id in self.memory.take(owner, num_pages, needed):
                parent = nodes[-1] if nodes else None
                tokens = (next(self.tickets),) * PAGE
                nodes.append(self.memory.share(owner, namespace, parent, tokens, page_id))
            assert self.naive.take(num_pages, needed)
            self.naive.num_inserted += num_pages
            prefix = NaivePrefix(namespace, num_pages, in_use=True)
            self.naive.prefixes.append(prefix)
            self.requests.append((namespace, nodes, prefix))
        elif namespace:
            self.release_adapter(namespace)

    def check_can_take(self, num_pages: int, needed: Needed) -> bool:
        idle = sum(self.naive.adapters[d].num_pages for d in self.naive.idle(needed))
        unused = sum(p.num_pages for p in self.naive.prefixes if not p.in_use)
        can_take = num_pages <= self.naive.num_free + idle + unused
        assert self.memory.can_take(num_pages, needed) == can_take
        return can_take

    def finish(self) -> None:
        if self.requests:
            namespace, nodes, prefix = self.requests.pop(self.rng.randrange(len(self.requests)))
            self.memory.prefix.release(nodes, self.now)
            prefix.in_use, prefix.last_used = False, self.now
            if namespace:
                self.release_adapter(namespace)

    def release_adapter(self, digest: str) -> None:
        self.memory.residency.release(digest, self.now)
        self.naive.adapters[digest].num_leases -= 1
        self.naive.use(digest, self.now, 1.0)

    def step(self) -> None:
        self.now += 1.0
        if self.rng.random() < 0.3:
            self.naive.in_host.discard(self.rng.choice(list(ADAPTER_PAGES)))
        self.rng.choices((self.load, self.start, self.finish), weights=(3, 4, 4))[0]()
        self.memory.check_invariants()
        evictions, _ = self.memory.drain_changes(self.now)
        self.naive.planned_at = self.now
        assert [(e.digest, e.cause) for e in evictions] == self.naive.evicted
        self.naive.evicted = []
        assert self.memory.pool.num_free == self.naive.num_free
        assert {a.digest for a in self.memory.residency} == set(self.naive.adapters)
        for namespace in ("", *ADAPTER_PAGES):
            num_pages = sum(p.num_pages for p in self.naive.prefixes if p.namespace == namespace)
            assert (namespace in self.memory.prefix.namespaces) == (num_pages > 0)


@pytest.mark.parametrize("policy", ["score", "lru"])
@pytest.mark.parametrize("seed", range(40))
def test_who_yields_equals_a_search_of_everyone(seed: int, policy: Policy) -> None:
    comparison = Comparison(seed, policy)
    for _ in range(150):
        comparison.step()


def resident(memory: PoolMemory, digest: str, num_pages: int, last_used: float) -> None:
    memory.load_adapter(digest, num_pages, NOBODY, last_used)
    memory.drain_changes(now=0.0)


def cached(memory: PoolMemory, namespace: str, num_pages: int, last_used: float) -> None:
    """KV that a request left behind."""
    owner, nodes = Owner(PageKind.SEQUENCE, "gone"), list[PrefixNode]()
    if namespace:
        memory.residency.acquire(namespace)
    for i, page_id in enumerate(memory.take(owner, num_pages, NOBODY)):
        parent = nodes[-1] if nodes else None
        nodes.append(memory.share(owner, namespace, parent, (i,) * PAGE, page_id))
    memory.prefix.release(nodes, last_used)
    if namespace:
        memory.residency.release(namespace, last_used)


OWNER = Owner(PageKind.SEQUENCE, "new")


def test_prefix_pages_of_an_adapter_go_before_the_adapter() -> None:
    memory = PoolMemory(8, PAGE, num_slots=2)
    resident(memory, "a", 3, last_used=0.0)
    cached(memory, "a", 3, last_used=1.0)
    for num_pages, has_adapter in ((2, True), (3, True), (1, False)):
        memory.take(OWNER, num_pages, NOBODY)
        assert (memory.residency.get("a") is not None) == has_adapter
    assert memory.prefix.num_pages == 0


def test_prefix_pages_go_before_an_adapter_that_is_worth_less_than_they_are() -> None:
    """Also when other prefix pages are older: those are worth more than the adapter, too."""
    costs = ReloadCosts(copy_page_s=1e-6, copy_s=1e-6, prefill_page_s=1.0)
    memory = PoolMemory(8, PAGE, num_slots=2, order=EvictionOrder(costs=costs))
    cached(memory, "", 2, last_used=0.0)
    resident(memory, "a", 3, last_used=0.0)
    cached(memory, "a", 3, last_used=1.0)
    for num_pages, num_prefix_pages, has_adapter in (
        (2, 3, True),
        (1, 2, True),
        (1, 2, False),
        (3, 1, False),
    ):
        memory.take(OWNER, num_pages, NOBODY)
        assert memory.prefix.num_pages == num_prefix_pages
        assert (memory.residency.get("a") is not None) == has_adapter
    memory.check_invariants()


@pytest.mark.parametrize("is_adapter_busy", [False, True])
def test_what_the_step_in_flight_may_read_yields_last(is_adapter_busy: bool) -> None:
    """A copy to its pages would have to wait for the step."""
    memory = PoolMemory(5, PAGE, num_slots=2)
    cached(memory, "", 2, last_used=0.0 if is_adapter_busy else 9.0)
    resident(memory, "a", 2, last_used=9.0 if is_adapter_busy else 0.0)
    memory.drain_changes(now=8.0)
    memory.take(OWNER, 3, NOBODY)
    assert (memory.residency.get("a") is not None) == is_adapter_busy
    assert memory.prefix.num_pages == (0 if is_adapter_busy else 2)


def test_an_adapter_takes_its_prefix_pages_along() -> None:
    memory = PoolMemory(8, PAGE, num_slots=1)
    resident(memory, "a", 3, last_used=0.0)
    cached(memory, "a", 3, last_used=1.0)
    memory.load_adapter("b", 1, NOBODY, now=2.0)
    evictions, freed = memory.drain_changes(now=0.0)
    assert [(e.digest, e.slot, e.cause) for e in evictions] == [("a", 0, EvictionCause.SLOT)]
    assert len(freed) == 6
    assert set(evictions[0].page_ids) < set(freed)
    assert memory.pool.num_free == 7
    memory.check_invariants()


def test_the_adapter_that_loses_its_slot_makes_room_before_anything_else_is_evicted() -> None:
    memory = PoolMemory(8, PAGE, num_slots=1)
    cached(memory, "", 4, last_used=0.0)
    resident(memory, "a", 4, last_used=1.0)
    memory.load_adapter("b", 4, NOBODY, now=2.0)
    assert memory.prefix.num_pages == 4


def test_by_lru_what_was_used_longest_ago_yields_first() -> None:
    memory = PoolMemory(6, PAGE, num_slots=2, order=EvictionOrder("lru"))
    resident(memory, "old", 2, last_used=0.0)
    cached(memory, "", 2, last_used=1.0)
    resident(memory, "new", 2, last_used=2.0)
    memory.take(OWNER, 2, NOBODY)
    assert memory.drain_changes(now=0.0)[0][0].digest == "old"
    memory.take(OWNER, 2, NOBODY)
    assert memory.prefix.num_pages == 0
    memory.take(OWNER, 2, NOBODY)
    assert memory.drain_changes(now=0.0)[0][0].digest == "new"


def test_a_queued_adapter_yields_last() -> None:
    memory = PoolMemory(6, PAGE, num_slots=2)
    resident(memory, "queued", 2, last_used=0.0)
    cached(memory, "", 2, last_used=1.0)
    resident(memory, "unused", 2, last_used=2.0)
    needed = Needed(any={"queued"})
    memory.take(OWNER, 4, needed)
    assert {a.digest for a in memory.residency} == {"queued"}
    assert memory.prefix.num_pages == 0
    memory.take(OWNER, 2, needed)
    assert len(memory.residency) == 0


def test_pinned_and_leased_adapters_and_what_older_requests_need_never_yield() -> None:
    """FR-24"""
    memory = PoolMemory(6, PAGE, num_slots=3)
    for digest in ("pinned", "leased", "older"):
        resident(memory, digest, 2, last_used=0.0)
    memory.residency.acquire("leased")
    memory.residency.pin("pinned", 2)
    needed = Needed(older={"older"})
    assert not memory.can_take(1, needed)
    assert not memory.has_slot(needed)
    assert memory.can_take(2, NOBODY)
    assert memory.has_slot(NOBODY)


def test_nodes_that_the_asker_is_going_to_use_do_not_count_as_room() -> None:
    memory = PoolMemory(4, PAGE, num_slots=0)
    cached(memory, "", 3, last_used=0.0)
    nodes = memory.prefix.match("", (0,) * PAGE, PAGE)
    assert memory.can_take(4, NOBODY)
    assert not memory.can_take(4, NOBODY, keeping=nodes)
    assert memory.can_take(3, NOBODY, keeping=nodes)


def test_a_page_whose_tokens_are_cached_already_is_freed_for_the_cached_one() -> None:
    memory = PoolMemory(4, PAGE, num_slots=0)
    cached(memory, "", 1, last_used=0.0)
    (page_id,) = memory.take(OWNER, 1, NOBODY)
    node = memory.share(OWNER, "", None, (0,) * PAGE, page_id)
    assert node.page_id != page_id
    assert memory.drain_changes(now=0.0)[1] == (page_id,)
    assert memory.pool.num_free == 3


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for_tokens_are_rounded_up(num_tokens: int, expected: int) -> None:
    assert PoolMemory(1, PAGE, 0).pages_for(num_tokens) == expected
