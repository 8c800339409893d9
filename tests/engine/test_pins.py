"""Pinned adapters: never evicted, subtracted from capacity, refused where nothing would be left."""

from __future__ import annotations

import pytest

from engine.errors import Conflict, ModelNotFound, RequestTooLarge
from engine.request import AdapterRef
from tests.engine.fakes import PAGE_BYTES, Harness, image

REFS = {name: AdapterRef(name, f"dir/{name}", "1") for name in "abc"}


def use(harness: Harness, name: str, number: int, num_pages: int = 2) -> None:
    """One request that reads the adapter."""
    harness.add(f"use-{name}", REFS[name])
    harness.loaded(REFS[name], image(number, num_pages))
    harness.run()


def resident(harness: Harness) -> set[str]:
    return {adapter.digest for adapter in harness.core.memory.residency}


def pin(harness: Harness, name: str) -> object:
    call_id = f"pin-{len(harness.answers)}"
    harness.core.pin_adapter(call_id, name)
    harness.collect()
    return harness.answers[call_id]


def pin_without_room(harness: Harness) -> None:
    """Of 20 pages two requests take 12; `a` takes 11."""
    for request_id in ("one", "two"):
        harness.add(request_id, length=20, max_tokens=4)
    harness.step()
    harness.core.load_adapter("load", REFS["a"])
    harness.loaded(REFS["a"], image(1, num_pages=11))
    assert pin(harness, "a") == {}


def test_a_pinned_adapter_stays_when_others_need_its_slot_and_goes_when_it_is_unpinned() -> None:
    harness = Harness(max_adapters=2)
    use(harness, "a", 1)
    assert pin(harness, "a") == {}
    use(harness, "b", 2)
    use(harness, "c", 3)
    assert resident(harness) == {"digest-1", "digest-3"}
    harness.core.unpin_adapter("unpin", "a")
    harness.add("again", REFS["b"])
    harness.run()
    assert resident(harness) == {"digest-2", "digest-3"}
    harness.assert_nothing_is_held()


def test_an_unknown_adapter_cannot_be_pinned() -> None:
    assert isinstance(pin(Harness(), "a"), ModelNotFound)


def test_pinning_is_refused_where_no_slot_or_too_few_pages_would_be_left() -> None:
    harness = Harness(num_pages=20, max_adapters=2)
    use(harness, "a", 1)
    use(harness, "b", 2)
    assert pin(harness, "a") == pin(harness, "a") == {}
    error = pin(harness, "b")
    assert isinstance(error, Conflict)
    assert error.param == "max_adapters"
    harness = Harness(num_pages=20, max_adapters=4)
    use(harness, "a", 1, num_pages=10)
    harness.add("large", length=40, max_tokens=8)  # 12 of the 20 pages
    error = pin(harness, "a")
    assert isinstance(error, Conflict)
    assert error.param == "pool_bytes"
    harness.run()
    assert pin(harness, "a") == {}


def test_what_a_request_that_is_here_needs_counts_its_adapter_unless_that_is_the_pinned_one() -> None:
    harness = Harness(num_pages=20, max_adapters=4)
    use(harness, "a", 1, num_pages=10)
    use(harness, "b", 2, num_pages=8)
    harness.add("of another", REFS["b"], length=8, max_tokens=4)  # 3 pages and those of b
    assert isinstance(pin(harness, "a"), Conflict)
    harness.core.abort("of another")
    harness.add("its own", REFS["a"], length=36, max_tokens=4)  # 10 pages
    assert pin(harness, "a") == {}
    harness.run()
    assert harness.ends["its own"].finish_reason == "length"


def test_capacity_is_net_of_pinned_adapters() -> None:
    """FR-36"""
    harness = Harness(num_pages=20)
    use(harness, "a", 1, num_pages=10)
    pin(harness, "a")
    with pytest.raises(RequestTooLarge, match=r"48, .* 40 tokens"):
        harness.add("large", length=30, max_tokens=18)


def test_a_pinned_adapter_is_loaded_without_any_request() -> None:
    harness = Harness(pinned_adapters=("a",))
    harness.core.load_adapter("load", REFS["a"])
    is_idle = [harness.core.is_idle]
    harness.loaded(REFS["a"], image(1))
    is_idle.append(harness.core.is_idle)
    harness.step()
    is_idle.append(harness.core.is_idle)
    assert resident(harness) == {"digest-1"}
    assert is_idle == [True, False, True]


def test_a_pinned_adapter_that_must_wait_for_room_is_loaded_later() -> None:
    harness = Harness(num_pages=20, prefix_cache=False)
    pin_without_room(harness)
    harness.step()
    assert resident(harness) == set()
    harness.run()
    harness.step()
    assert resident(harness) == {"digest-1"}


@pytest.mark.parametrize("read_as", ["a", "b"])
def test_pinning_what_has_left_host_memory_reads_it_again(read_as: str) -> None:
    """Under whatever name its content was read last."""
    harness = Harness(host_cache_bytes=2 * PAGE_BYTES, max_adapters=2)
    for name in dict.fromkeys(("a", read_as)):
        harness.core.load_adapter(f"load-{name}", REFS[name])
        harness.loaded(REFS[name], image(1))
    harness.core.load_adapter("other", REFS["c"])
    harness.loaded(REFS["c"], image(2))
    assert "digest-1" not in harness.core.manager
    assert pin(harness, "a") == {}
    harness.loaded(REFS[read_as], image(1))
    harness.step()
    assert resident(harness) == {"digest-1"}
    assert harness.core.memory.residency.is_pinned("digest-1")


def test_a_pinned_adapter_that_waits_for_room_stays_in_host_memory() -> None:
    """Nobody would read it again: no request waits for it."""
    harness = Harness(num_pages=20, prefix_cache=False, host_cache_bytes=12 * PAGE_BYTES)
    pin_without_room(harness)
    harness.core.load_adapter("other", REFS["b"])
    harness.loaded(REFS["b"], image(2))
    harness.run()
    harness.step()
    assert resident(harness) == {"digest-1"}


def test_a_name_stays_pinned_when_it_gets_a_new_version() -> None:
    harness = Harness(max_adapters=3, pinned_adapters=("a",))
    use(harness, "a", 1)
    newer = AdapterRef("a", "dir/a", "2")
    harness.core.load_adapter("load", newer)
    harness.loaded(newer, image(2))
    harness.step()
    residency = harness.core.memory.residency
    assert not residency.is_pinned("digest-1")
    assert residency.is_pinned("digest-2")
    assert resident(harness) == {"digest-2"}


def test_two_names_of_one_content_are_pinned_until_both_are_unpinned() -> None:
    harness = Harness(pinned_adapters=("a", "b"))
    for name in "ab":
        use(harness, name, 1)
    residency = harness.core.memory.residency
    harness.core.unpin_adapter("1", "a")
    assert residency.is_pinned("digest-1")
    harness.core.unpin_adapter("2", "b")
    assert not residency.is_pinned("digest-1")


def test_unloading_a_pinned_adapter_frees_it() -> None:
    harness = Harness(pinned_adapters=("a",))
    use(harness, "a", 1)
    harness.core.unload_adapter("unload", "a")
    harness.step()
    assert resident(harness) == set()
    assert harness.core.memory.residency.num_pinned_pages == 0
