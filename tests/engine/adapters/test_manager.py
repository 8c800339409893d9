from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from engine.adapters.manager import STALL_FACTOR, AdapterManager, Loaded
from engine.errors import AdapterRefused, Unavailable
from engine.request import AdapterRef

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage
    from engine.adapters.loader import LoadResult

PAGE_BYTES = 10
NOTHING: frozenset[str] = frozenset()


@dataclass
class FakeLoader:
    submitted: list[AdapterRef] = field(default_factory=list)
    refused: dict[AdapterRef, AdapterRefused] = field(default_factory=dict)

    def submit(self, ref: AdapterRef) -> None:
        self.submitted.append(ref)

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        self.refused[ref] = error

    def forget_failure(self, ref: AdapterRef) -> None: ...

    def close(self) -> None: ...


class Harness:
    def __init__(self, host_cache_bytes: int = 100, max_parallel_loads: int = 2) -> None:
        self.loader = FakeLoader()
        self.manager = AdapterManager(self.loader, host_cache_bytes, max_parallel_loads)

    def load(self, ref: AdapterRef, digest: str, pages: int = 1, needed: frozenset[str] = NOTHING) -> Loaded:
        self.manager.want(ref, "waiter")
        image = SimpleNamespace(digest=digest, num_pages=pages, nbytes=pages * PAGE_BYTES)
        loaded = self.finish(ref, cast("AdapterImage", image), needed=needed)
        if loaded.image is not None:
            self.manager.rename(ref.name, digest)
        self.manager.check_invariants()
        return loaded

    def finish(
        self,
        ref: AdapterRef,
        image: AdapterImage | None,
        error: AdapterRefused | Unavailable | None = None,
        needed: frozenset[str] = NOTHING,
    ) -> Loaded:
        self.loader.submitted.remove(ref)
        result = SimpleNamespace(ref=ref, image=image, error=error, seconds=0.0)
        return self.manager.on_loaded(cast("LoadResult", result), needed)

    @property
    def num_remembered(self) -> int:
        return len(self.manager._refs) + len(self.manager._digests) + len(self.manager._versions)


def ref(name: str, version: str = "1") -> AdapterRef:
    return AdapterRef(name, f"dir/{name}", version)


def test_a_cancelled_waiter_is_not_told_and_the_load_goes_on() -> None:
    """FR-34."""
    harness = Harness()
    for waiter in ("r1", "r2"):
        harness.manager.want(ref("a"), waiter)
    harness.manager.leave("r1")
    assert harness.loader.submitted == [ref("a")]
    assert harness.finish(ref("a"), None, Unavailable("busy")).waiters == ("r2",)


def test_an_image_beyond_the_host_cache_is_refused_and_not_read_again() -> None:
    """FR-37."""
    harness = Harness(host_cache_bytes=100)
    loaded = harness.load(ref("a"), "d", pages=11)
    assert isinstance(loaded.error, AdapterRefused)
    assert "110" in loaded.error.message
    assert "100" in loaded.error.message
    assert harness.loader.refused == {ref("a"): loaded.error}
    assert harness.num_remembered == 0
    assert harness.manager.cache.used_bytes == 0


def test_what_the_pool_has_no_room_for_is_forgotten_and_not_read_again() -> None:
    harness = Harness()
    harness.manager.want(ref("a"))
    image = SimpleNamespace(digest="d", num_pages=5, nbytes=50)
    loaded = harness.finish(ref("a"), cast("AdapterImage", image))
    error = AdapterRefused("pages", param="pool_bytes")
    harness.manager.refuse(loaded, error)
    assert harness.loader.refused == {ref("a"): error}
    assert "d" not in harness.manager
    assert harness.num_remembered == 0
    harness.manager.check_invariants()


def test_a_refusal_does_not_forget_what_requests_may_still_use() -> None:
    """The same bytes were served before: a request for them may have to read them again."""
    harness = Harness()
    harness.load(ref("a"), "d")
    harness.manager.unload("a")
    loaded = harness.load(ref("b"), "d")
    harness.manager.unload("b")
    harness.manager.refuse(loaded, AdapterRefused("pages", param="pool_bytes"))
    harness.manager.want_again("d")
    assert harness.loader.submitted == [ref("b")]


def test_what_is_remembered_is_bounded_by_the_names_in_use() -> None:
    """FR-22: however often an adapter changes, and however often it is written again without a change."""
    harness = Harness()
    for name in "ab":
        harness.load(ref(name), f"{name}0")
    before = harness.num_remembered
    for number in range(1, 50):
        for name in "ab":
            harness.load(ref(name, str(number)), f"{name}{number}")
            harness.manager.drop(f"{name}{number - 1}")
        harness.load(ref("a", f"again {number}"), f"a{number}")
    assert harness.num_remembered == before
    assert harness.manager.digest(ref("a", "again 49")) == "a49"
    for name in "ab":
        harness.manager.unload(name)
        harness.manager.drop(f"{name}49")
    assert harness.num_remembered == 0
    assert harness.manager.cache.used_bytes == 0


def test_a_named_adapter_can_be_read_again_after_it_was_dropped() -> None:
    harness = Harness()
    harness.load(ref("a"), "d")
    harness.manager.drop("d")
    assert harness.manager.digest(ref("a")) == "d"
    harness.manager.want_again("d")
    assert harness.loader.submitted == [ref("a")]


@pytest.mark.parametrize("parked", [0, 3])
def test_loads_in_flight_and_parked_images_are_bounded(parked: int) -> None:
    harness = Harness(host_cache_bytes=10, max_parallel_loads=2)
    digests = [f"d{index}" for index in range(parked + 1)]
    needed = frozenset(digests)
    for index, digest in enumerate(digests):
        harness.load(ref(f"x{index}"), digest, needed=needed)
    for index in range(20):
        harness.manager.want(ref(f"y{index}"))
    assert len(harness.loader.submitted) == STALL_FACTOR * 2 - parked
    harness.manager.settle(NOTHING)
    assert len(harness.loader.submitted) == STALL_FACTOR * 2


def test_the_owner_says_what_an_image_is_worth() -> None:
    loader = FakeLoader()
    asked = []

    def worth(digest: str, num_pages: int) -> float:
        asked.append((digest, num_pages))
        return {"d0": 2.0, "d1": 1.0}[digest]

    harness = Harness()
    harness.loader, harness.manager = loader, AdapterManager(loader, 100, 2, worth)
    harness.load(ref("a"), "d0", pages=3)
    harness.load(ref("b"), "d1", pages=4)
    harness.load(ref("c"), "d2", pages=5)
    assert "d1" not in harness.manager
    assert "d0" in harness.manager
    assert set(asked) == {("d0", 3), ("d1", 4)}
    assert harness.manager.num_evicted == 1
