"""What names mean to the engine's body: versions, unloads, and requests that come late for either."""

from __future__ import annotations

from engine.errors import ModelNotFound, RequestTooLarge
from engine.latecomers import LATE_S
from engine.request import AdapterRef
from engine.snapshot import snapshot
from tests.engine.fakes import PAGE_BYTES, Harness, image

A = AdapterRef("a", "dir/a", "1")
B = AdapterRef("b", "dir/b", "1")
C = AdapterRef("c", "dir/c", "1")


def test_new_version_takes_over_while_the_old_one_drains() -> None:
    """FR-22: running requests finish on the version they began with."""
    harness = Harness()
    harness.add("v1", A, max_tokens=20)
    harness.loaded(A, image(1))
    harness.step(3)
    newer = AdapterRef("a", "dir/a", "2")
    harness.core.load_adapter("reload", newer)
    harness.loaded(newer, image(2))
    harness.add("v2", newer)
    harness.run()
    assert harness.tokens["v1"] == [1] * 20
    assert harness.tokens["v2"] == [2] * 4
    assert [a.digest for a in harness.core.memory.residency] == ["digest-2"]
    assert "digest-1" not in harness.core.manager


def test_reloading_the_same_bytes_keeps_them() -> None:
    harness = Harness()
    harness.add("r", A)
    harness.loaded(A, image(1))
    harness.run()
    touched = AdapterRef("a", "dir/a", "2")
    harness.add("again", touched)
    harness.loaded(touched, image(1))
    harness.run()
    assert harness.core.stats.hbm_evictions == {}
    assert harness.tokens["again"] == [1] * 4


def test_one_content_under_two_names_is_held_once() -> None:
    harness = Harness()
    for ref in (A, B):
        harness.add(ref.name, ref)
        harness.loaded(ref, image(1))
    harness.run()
    assert len(harness.core.memory.residency) == 1
    harness.core.unload_adapter("call", "a")
    harness.run()
    assert len(harness.core.memory.residency) == 1


def test_unload_drains_and_returns_pages_and_bytes() -> None:
    """FR-28."""
    harness = Harness()
    free = harness.core.memory.pool.num_free
    harness.add("r", A, max_tokens=20)
    harness.loaded(A, image(1))
    harness.step(3)
    harness.core.unload_adapter("call", "a")
    harness.collect()
    assert harness.answers["call"] == {}
    harness.run()
    assert harness.tokens["r"] == [1] * 20
    assert "a" not in harness.core.stats.adapters, "its counters came back with its last tokens"
    assert harness.core.memory.pool.num_free == free
    assert harness.core.manager.cache.used_bytes == 0
    harness.core.unload_adapter("again", "a")
    harness.collect()
    assert isinstance(harness.answers["again"], ModelNotFound)


def test_a_name_that_comes_back_with_other_bytes_is_held_once() -> None:
    """FR-28: a, b and c in two slots; after its unload nothing of b is left, in no memory and no number."""
    harness = Harness(max_adapters=2)
    core = harness.core
    for ref, number in ((A, 1), (C, 3), (B, 2)):
        before = core.manager.cache.used_bytes
        harness.add(ref.name, ref)
        harness.loaded(ref, image(number))
        harness.run()
    core.unload_adapter("unload", "b")
    harness.run()
    assert core.manager.cache.used_bytes == before
    assert "digest-2" not in {adapter.digest for adapter in core.memory.residency}
    assert "b" not in snapshot(core)["adapters"]
    other = AdapterRef("b", "dir/b", "2")
    core.load_adapter("load", other)
    harness.add("again", other)
    harness.loaded(other, image(4))
    harness.run()
    assert harness.tokens["again"] == [4] * 4
    assert core.manager.cache.used_bytes == 3 * 2 * PAGE_BYTES
    assert "digest-2" not in core.manager


def test_a_late_request_is_served_and_does_not_bring_an_unloaded_name_back() -> None:
    """It was on its way when the name was unloaded; its content goes with it, and so do its series."""
    harness = Harness()
    core = harness.core
    free = core.memory.pool.num_free
    core.load_adapter("load", A)
    harness.loaded(A, image(1))
    core.unload_adapter("unload", "a")
    for request_id in ("late", "later"):
        harness.add(request_id, A)
    harness.loaded(A, image(1))
    harness.step(2)
    harness.add("last", A)
    harness.run()
    assert all(harness.tokens[request_id] == [1] * 4 for request_id in ("late", "later", "last"))
    assert "a" not in snapshot(core)["adapters"]
    assert "a" not in core.stats.adapters
    assert core.manager.cache.used_bytes == 0
    assert core.memory.pool.num_free == free


def test_a_late_request_that_fails_leaves_no_series() -> None:
    harness = Harness(num_pages=10)
    harness.core.unload_adapter("unload", "a")
    harness.add("late", A, length=30, max_tokens=6)
    harness.loaded(A, image(1, num_pages=2))
    assert isinstance(harness.ends["late"].error, RequestTooLarge)
    assert "a" not in harness.core.stats.adapters
    assert harness.core.manager.cache.used_bytes == 0


def test_who_asks_a_while_after_an_unload_is_not_late() -> None:
    """Its source may have it again, of which no replica is told."""
    harness = Harness()
    harness.core.unload_adapter("unload", "a")
    harness.now += LATE_S
    harness.add("r", A)
    harness.loaded(A, image(1))
    harness.run()
    assert harness.core.manager.digest_of("a") == "digest-1"


def test_two_names_of_one_place_are_both_known() -> None:
    """They share a load, and later what is here: each has its series and its tier."""
    harness = Harness()
    alias, other = AdapterRef("alias", A.uri, A.version), AdapterRef("other", A.uri, A.version)
    for ref in (A, alias):
        harness.add(ref.name, ref)
    harness.loaded(A, image(1))
    harness.add("other", other)
    harness.run()
    adapters = snapshot(harness.core)["adapters"]
    for name in ("a", "alias", "other"):
        assert (adapters[name]["tier"], adapters[name]["rank"], adapters[name]["output_tokens"]) == (
            "hbm", 8, 4,
        )  # fmt: skip
    assert [adapters[name]["misses"] for name in ("a", "alias", "other")] == [1, 1, 0]
