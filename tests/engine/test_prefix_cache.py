from __future__ import annotations

import itertools
import random
import tracemalloc
from dataclasses import dataclass, field

import pytest

from engine.prefix_cache import PrefixCache, PrefixNode

PAGE = 4
NAMESPACES = ("", "a@1", "a@2")

Prefix = tuple[str, tuple[int, ...]]


@dataclass(slots=True)
class Entry:
    page_id: int
    num_users: int = 0
    last_used: float = 0.0


@dataclass(slots=True)
class NaiveCache:
    """One dict of whole prefixes; everything else is found by looking at all of them."""

    entries: dict[Prefix, Entry] = field(default_factory=dict)

    def match(self, namespace: str, tokens: tuple[int, ...]) -> list[Prefix]:
        ends = range(PAGE, len(tokens) + 1, PAGE)
        prefixes: list[Prefix] = [(namespace, tokens[:end]) for end in ends]
        return list(itertools.takewhile(lambda p: p in self.entries, prefixes))

    def leaves(self) -> list[Prefix]:
        """Unused ones that no longer prefix continues."""
        return [
            p
            for p, entry in self.entries.items()
            if entry.num_users == 0 and not any(q != p and is_prefix(p, q) for q in self.entries)
        ]

    def unused(self, namespace: str | None = None) -> list[Prefix]:
        return [p for p, e in self.entries.items() if e.num_users == 0 and namespace in (None, p[0])]


def is_prefix(p: Prefix, q: Prefix) -> bool:
    return p[0] == q[0] and q[1][: len(p[1])] == p[1]


def whole_prefix(node: PrefixNode) -> Prefix:
    tokens: tuple[int, ...] = ()
    above: PrefixNode | None = node
    while above is not None:
        tokens, above = above.tokens + tokens, above.parent
    return node.namespace, tokens


class Comparison:
    """Drives both caches as a scheduler would: match and acquire, add full pages, release all."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = PrefixCache(PAGE)
        self.naive = NaiveCache()
        self.page_ids = itertools.count()
        self.now = 0.0
        self.held: list[tuple[list[PrefixNode], list[Prefix]]] = []

    def tokens(self) -> tuple[int, ...]:
        # pages of equal tokens, so that few kinds of pages collide often
        num_pages = self.rng.randint(0, 4)
        pages = [(self.rng.randrange(3),) * PAGE for _ in range(num_pages)]
        return sum(pages, ()) + (self.rng.randrange(3),) * self.rng.randrange(PAGE)

    def start(self) -> None:
        namespace, tokens = self.rng.choice(NAMESPACES), self.tokens()
        nodes = self.cache.match(namespace, (*tokens, 9, 9, 9, 9), len(tokens))
        prefixes = self.naive.match(namespace, tokens)
        assert [whole_prefix(n) for n in nodes] == prefixes
        assert [n.page_id for n in nodes] == [self.naive.entries[p].page_id for p in prefixes]
        self.cache.acquire(nodes)
        for prefix in prefixes:
            self.naive.entries[prefix].num_users += 1
        self.held.append((nodes, prefixes))
        self.grow(nodes, prefixes, namespace, tokens)

    def grow(
        self, nodes: list[PrefixNode], prefixes: list[Prefix], namespace: str, tokens: tuple[int, ...]
    ) -> None:
        """Insert the pages behind those that were found; they may exist by now all the same."""
        for start in range(len(nodes) * PAGE, len(tokens) - PAGE + 1, PAGE):
            parent = nodes[-1] if nodes else None
            page_id = next(self.page_ids)
            node = self.cache.insert(namespace, parent, tokens[start : start + PAGE], page_id)
            prefix = (namespace, tokens[: start + PAGE])
            entry = self.naive.entries.setdefault(prefix, Entry(page_id))
            assert node.page_id == entry.page_id
            entry.num_users += 1
            nodes.append(node)
            prefixes.append(prefix)

    def continue_held(self) -> None:
        if self.held:
            nodes, prefixes = self.rng.choice(self.held)
            if prefixes:
                namespace, tokens = prefixes[-1]
                self.grow(nodes, prefixes, namespace, tokens + self.tokens())

    def release(self) -> None:
        if self.held:
            nodes, prefixes = self.held.pop(self.rng.randrange(len(self.held)))
            self.cache.release(nodes, self.now)
            for prefix in prefixes:
                self.naive.entries[prefix].num_users -= 1
                self.naive.entries[prefix].last_used = self.now

    def evict(self) -> None:
        leaf, leaves = self.cache.oldest_evictable(), self.naive.leaves()
        if leaf is None:
            assert not leaves
            return
        prefix = whole_prefix(leaf)
        assert prefix in leaves
        assert leaf.last_used == min(self.naive.entries[p].last_used for p in leaves)
        assert self.cache.evict(leaf) == self.naive.entries.pop(prefix).page_id

    def evict_namespace(self) -> None:
        namespace = self.rng.choice(NAMESPACES)
        page_ids = {self.naive.entries.pop(p).page_id for p in self.naive.unused(namespace)}
        freed = self.cache.evict_namespace(namespace)
        assert set(freed) == page_ids
        assert len(freed) == len(page_ids)

    def step(self) -> None:
        self.now += self.rng.choice((0.0, 1.0))
        actions = (self.start, self.continue_held, self.release, self.evict, self.evict_namespace)
        self.rng.choices(actions, weights=(6, 3, 6, 6, 1))[0]()
        self.cache.check_invariants()
        assert self.cache.num_pages == len(self.naive.entries)
        assert self.cache.num_evictable == len(self.naive.unused())
        assert set(self.cache.namespaces) == {namespace for namespace, _ in self.naive.entries}


@pytest.mark.parametrize("seed", range(30))
def test_equals_a_dict_of_all_prefixes(seed: int) -> None:
    comparison = Comparison(seed)
    for _ in range(200):
        comparison.step()


def fill(cache: PrefixCache, namespace: str, tokens: tuple[int, ...], first_page: int) -> list[PrefixNode]:
    nodes: list[PrefixNode] = []
    for i, start in enumerate(range(0, len(tokens), PAGE)):
        parent = nodes[-1] if nodes else None
        nodes.append(cache.insert(namespace, parent, tokens[start : start + PAGE], first_page + i))
    return nodes


def test_the_same_tokens_under_another_digest_never_match() -> None:
    """FR-22"""
    cache = PrefixCache(PAGE)
    fill(cache, "a@1", (1, 2, 3, 4), first_page=0)
    assert cache.match("a@1", (1, 2, 3, 4), 4) != []
    assert cache.match("a@2", (1, 2, 3, 4), 4) == []
    assert cache.match("", (1, 2, 3, 4), 4) == []


def test_a_partly_filled_page_does_not_match() -> None:
    cache = PrefixCache(PAGE)
    fill(cache, "", (1, 2, 3, 4), first_page=0)
    assert cache.match("", (1, 2, 3, 4), 3) == []


def test_pages_in_use_are_not_evicted_and_the_rest_goes_oldest_leaf_first() -> None:
    cache = PrefixCache(PAGE)
    old = fill(cache, "", (1, 1, 1, 1, 2, 2, 2, 2), first_page=0)
    new = fill(cache, "", (3, 3, 3, 3, 4, 4, 4, 4), first_page=2)
    used = fill(cache, "", (5, 5, 5, 5), first_page=4)
    cache.release(old, now=1.0)
    cache.release(new, now=2.0)
    order = []
    while (leaf := cache.oldest_evictable()) is not None:
        order.append(cache.evict(leaf))
    assert order == [1, 0, 3, 2]
    assert cache.num_pages == 1
    with pytest.raises(AssertionError):
        cache.evict(used[0])


def test_a_page_with_continuations_is_not_evicted() -> None:
    cache = PrefixCache(PAGE)
    nodes = fill(cache, "", (1, 1, 1, 1, 2, 2, 2, 2), first_page=0)
    cache.release(nodes, now=1.0)
    with pytest.raises(AssertionError):
        cache.evict(nodes[0])


def test_a_prefix_that_is_used_for_ever_costs_no_memory() -> None:
    """What is released again and again does not queue up for an eviction that never comes."""
    cache = PrefixCache(PAGE)
    nodes = fill(cache, "", (1, 1, 1, 1), first_page=0)
    tracemalloc.start()
    for i in range(2000):
        cache.release(nodes, now=float(i))
        cache.acquire(nodes)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 8192


def by_reuse(_: float, reuse: float) -> float:
    return reuse


def test_pages_that_were_found_are_kept_apart_from_those_that_never_were() -> None:
    cache = PrefixCache(PAGE)
    system = cache.insert("", None, (0,) * PAGE, 0)
    for i in range(1, 10):
        own = cache.insert("", system, (i,) * PAGE, i)
        cache.release([system, own], now=float(i))
        cache.acquire([system])
    cache.release([system], now=10.0)
    reuse, leaf = cache.cheapest_leaf(by_reuse) or (0.0, None)
    assert leaf is not None
    assert leaf.page_id == 1
    assert reuse == pytest.approx((1 + 1) / (1 + 10))  # of ten new pages one was found
    for page_id in range(1, 10):
        assert (leaf := cache.oldest_evictable()) is not None
        assert cache.evict(leaf) == page_id
    reuse, leaf = cache.cheapest_leaf(by_reuse) or (0.0, None)
    assert leaf is system
    assert reuse == pytest.approx((1 + 8) / (1 + 1))
    cache.check_invariants()


def test_a_page_that_was_found_goes_after_the_pages_below_it() -> None:
    cache = PrefixCache(PAGE)
    top = cache.insert("", None, (0,) * PAGE, 0)
    cache.release([top], now=0.0)
    cache.acquire([top])
    below = cache.insert("", top, (1,) * PAGE, 1)
    cache.release([top, below], now=1.0)
    for worth in (by_reuse, lambda last_used, reuse: -reuse, lambda last_used, reuse: last_used):
        found = cache.cheapest_leaf(worth)
        assert found is not None
        assert found[1] is below


def test_a_page_that_is_computed_twice_was_not_found() -> None:
    cache = PrefixCache(PAGE)
    for now in (0.0, 1.0):
        cache.release([cache.insert("", None, (0,) * PAGE, 0)], now)
    assert cache.cheapest_leaf(by_reuse) is not None
    assert not cache.oldest_evictable().was_found  # type: ignore[union-attr]


def test_reuse_of_long_ago_fades() -> None:
    cache = PrefixCache(PAGE)
    for i in range(1000):
        cache.acquire([cache.insert("", None, (i,) * PAGE, i)])
    for i in range(100_000):
        cache.insert("", None, (-i,) * PAGE, 1000 + i)
    cache.release([cache.insert("a", None, (0,) * PAGE, -1)], now=0.0)
    assert (cache.cheapest_leaf(by_reuse) or (1.0,))[0] < 0.01
