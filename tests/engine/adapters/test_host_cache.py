from __future__ import annotations

import random

import pytest

from engine.adapters.host_cache import HostCache


class NaiveCache:
    """The same policy from a log of uses: recomputed from scratch at every step."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[str, int] = {}
        self.log: list[str] = []

    def put(self, digest: str, nbytes: int, protected: set[str]) -> tuple[str, ...] | None:
        def last_use(name: str) -> int:
            return len(self.log) - 1 - self.log[::-1].index(name)

        kept = dict(self.sizes)
        evicted = []
        for name in sorted(self.sizes, key=last_use):
            if sum(kept.values()) + nbytes <= self.capacity:
                break
            if name not in protected:
                del kept[name]
                evicted.append(name)
        if sum(kept.values()) + nbytes > self.capacity:
            return None
        self.sizes = {**kept, digest: nbytes}
        self.log.append(digest)
        return tuple(evicted)


@pytest.mark.parametrize("seed", range(30))
def test_it_equals_a_naive_simulation(seed: int) -> None:
    rng = random.Random(seed)
    cache, naive = HostCache(100), NaiveCache(100)
    for step in range(300):
        held = sorted(naive.sizes)
        action = rng.random()
        if action < 0.5:
            digest, nbytes = f"d{step}", rng.randint(1, 60)
            protected = {name for name in held if rng.random() < 0.3}
            assert cache.put(digest, nbytes, protected) == naive.put(digest, nbytes, protected)
        elif held and action < 0.8:
            digest = rng.choice(held)
            cache.touch(digest)
            naive.log.append(digest)
        elif held:
            digest = rng.choice(held)
            cache.remove(digest)
            del naive.sizes[digest]
        cache.check_invariants()
        assert set(cache.digests) == set(naive.sizes)
        assert cache.used_bytes == sum(naive.sizes.values())


def test_the_least_recently_used_goes_first() -> None:
    cache = HostCache(30)
    for digest in "abc":
        assert cache.put(digest, 10, set()) == ()
    cache.touch("a")
    assert cache.put("d", 10, set()) == ("b",)
    assert set(cache.digests) == {"c", "a", "d"}
    assert "b" not in cache


def test_the_least_worth_goes_first_where_a_worth_is_given() -> None:
    worth = {"a": 1.0, "b": 0.0, "c": 2.0, "d": 0.0, "e": 3.0}
    cache = HostCache(40, worth.__getitem__)
    for digest in "abcd":
        cache.put(digest, 10, set())
    assert cache.put("e", 10, {"b"}) == ("d",)
    worth["b"] = 2.5
    cache.touch("b")
    assert cache.put("f", 20, set()) == ("a", "c")
    cache.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_worths_that_rise_are_followed(seed: int) -> None:
    rng = random.Random(seed)
    worth: dict[str, float] = {}
    cache = HostCache(100, worth.__getitem__)
    held: dict[str, int] = {}
    for step in range(300):
        for digest in held:
            if rng.random() < 0.3:
                worth[digest] += rng.randrange(10)
        digest, nbytes = f"d{step:03}", rng.randint(1, 30)
        worth[digest] = step + rng.random()
        protected = {other for other in held if rng.random() < 0.1}
        evicted = cache.put(digest, nbytes, protected)
        cache.check_invariants()
        if evicted is None:
            continue
        free = 100 - sum(held.values())
        expected = []
        for other in sorted(held.keys() - protected, key=worth.__getitem__):
            if free >= nbytes:
                break
            expected.append(other)
            free += held.pop(other)
        assert set(evicted) == set(expected)
        held[digest] = nbytes
    assert set(cache.digests) == set(held)


def test_making_room_looks_at_few_of_many_images() -> None:
    num_looks = 0

    def worth(digest: str) -> float:
        nonlocal num_looks
        num_looks += 1
        return int(digest)

    cache = HostCache(5000, worth)
    for i in range(10_000):
        cache.put(f"{i}", 1, set())
    assert len(cache.digests) == 5000
    assert num_looks < 5 * 10_000


def test_images_that_come_and_go_leave_nothing() -> None:
    cache = HostCache(30)
    cache.put("stays", 10, set())
    for i in range(1000):
        cache.put(f"{i}", 10, set())
        cache.remove(f"{i}")
    cache.check_invariants()
    assert len(cache._heap) < 100
    assert cache.put("large", 30, set()) == ("stays",)


def test_the_order_outlives_images_that_come_and_go() -> None:
    worth = {"a": 3.0, "b": 2.0, "c": 1.0}
    cache = HostCache(4, lambda digest: worth.get(digest, 9.0))
    for digest in "abc":
        cache.put(digest, 1, set())
    assert cache.put("large", 2, set("abc")) is None  # all have been looked at
    for i in range(200):
        cache.put(f"{i}", 1, set())
        cache.check_invariants()
        cache.remove(f"{i}")
    cache.put("last", 1, set())
    assert cache.put("large", 2, set()) == ("c", "b")


def test_of_equal_worth_the_least_recently_used_goes_first() -> None:
    cache = HostCache(30, lambda digest: 0.0)
    for digest in "abc":
        cache.put(digest, 10, set())
    cache.touch("a")
    assert cache.put("d", 20, set()) == ("b", "c")


def test_what_is_protected_stays_and_a_put_without_room_changes_nothing() -> None:
    """FR-24."""
    cache = HostCache(30)
    for digest in "abc":
        cache.put(digest, 10, set())
    assert cache.put("d", 20, {"a", "b"}) is None
    assert list(cache.digests) == ["a", "b", "c"]
    assert cache.put("d", 20, {"b"}) == ("a", "c")
    cache.check_invariants()


def test_no_more_is_evicted_than_is_needed() -> None:
    cache = HostCache(30)
    for digest in "abc":
        cache.put(digest, 10, set())
    assert cache.put("d", 5, set()) == ("a",)
    assert cache.put("e", 5, set()) == ()
    assert cache.used_bytes == 30


def test_an_image_that_can_never_fit_finds_no_room() -> None:
    """FR-37."""
    cache = HostCache(30)
    assert cache.put("a", 31, set()) is None
    assert cache.put("a", 30, set()) == ()


def test_removed_bytes_are_free_again() -> None:
    """FR-28."""
    cache = HostCache(30)
    cache.put("a", 30, set())
    cache.remove("a")
    assert cache.used_bytes == 0
    assert cache.put("b", 30, set()) == ()
