from __future__ import annotations

import pytest

from engine.eviction import EvictionOrder
from engine.residency import AdapterResidency


def test_an_adapter_gets_a_slot_of_its_own_and_returns_it() -> None:
    residency = AdapterResidency(num_slots=2)
    first = residency.insert("a", (0, 1), now=0.0)
    second = residency.insert("b", (2,), now=0.0)
    assert {first.slot, second.slot} == {0, 1}
    assert not residency.has_free_slot
    assert residency.evict("a").page_ids == (0, 1)
    assert residency.get("a") is None
    assert residency.insert("c", (3,), now=1.0).slot == first.slot
    residency.check_invariants()
    assert [a.digest for a in residency] == ["b", "c"]
    assert len(residency) == 2


def test_what_is_leased_or_pinned_is_not_evicted() -> None:
    """FR-24"""
    residency = AdapterResidency(num_slots=2)
    adapter = residency.insert("a", (0,), now=0.0)
    residency.acquire("a")
    residency.acquire("a")
    residency.release("a", now=3.0)
    assert list(residency.idle()) == []
    with pytest.raises(AssertionError):
        residency.evict("a")
    residency.release("a", now=4.0)
    assert list(residency.idle()) == [adapter]
    assert adapter.last_used == 4.0
    residency.pin("a", 1)
    assert list(residency.idle()) == []
    with pytest.raises(AssertionError):
        residency.evict("a")
    residency.check_invariants()


def test_a_lease_is_returned_once() -> None:
    residency = AdapterResidency(num_slots=1)
    residency.insert("a", (0,), now=0.0)
    residency.acquire("a")
    residency.release("a", now=0.0)
    with pytest.raises(AssertionError):
        residency.release("a", now=0.0)


def test_the_same_content_is_resident_once() -> None:
    residency = AdapterResidency(num_slots=2)
    residency.insert("a", (0,), now=0.0)
    with pytest.raises(AssertionError):
        residency.insert("a", (1,), now=0.0)


def test_idle_adapters_come_in_the_order_of_their_worth() -> None:
    residency = AdapterResidency(num_slots=3, order=EvictionOrder("lru"))
    for i, digest in enumerate("abc"):
        residency.insert(digest, (i,), now=0.0)
    residency.acquire("a")
    residency.acquire("b")
    residency.release("b", now=1.0)
    residency.release("a", now=2.0)
    assert [a.digest for a in residency.idle()] == ["c", "b", "a"]
    assert residency.num_idle_pages == 3
    residency.check_invariants()


def test_an_adapter_is_revalued_when_its_image_leaves_host_memory() -> None:
    in_host = {"a", "b"}
    residency = AdapterResidency(num_slots=2, order=EvictionOrder(in_host=in_host))
    a = residency.insert("a", (0,), now=0.0)
    residency.insert("b", (1,), now=0.0)
    assert [i.digest for i in residency.idle()] == ["a", "b"]
    assert not residency.revalue(a)
    in_host.remove("a")
    assert residency.revalue(a)
    assert [i.digest for i in residency.idle()] == ["b", "a"]
    residency.check_invariants()


def test_pinned_pages_are_counted_also_before_the_adapter_is_there() -> None:
    residency = AdapterResidency(num_slots=3)
    residency.pin("c", 3)
    for digest, page_ids in (("a", (0, 1)), ("b", (2,)), ("c", (3, 4, 5))):
        residency.insert(digest, page_ids, now=0.0)
    residency.pin("a", 2)
    residency.pin("a", 2)
    assert (residency.num_pinned, residency.num_pinned_pages, residency.num_idle_pages) == (2, 5, 1)
    residency.check_invariants()
    residency.unpin("a")
    residency.unpin("b")
    assert residency.num_pinned_pages == 3
    assert [a.digest for a in residency.idle()] == ["a", "b"]
    residency.check_invariants()
