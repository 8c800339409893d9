"""The catalog over a source in a dictionary: what is desired, what survives, who has seen it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.source import AdapterListing
from engine.errors import AccessDenied, Conflict, InvalidRequest, LorafleetError, ModelNotFound, Unavailable
from engine.request import AdapterRef
from router import catalog as catalog_module
from router.catalog import Catalog, Snapshot
from router.catalog_state import CatalogState

DOWN = Unavailable("no answer", retry_after_s=2.0)


class FakeSource:
    """Adapters by name, with their versions."""

    def __init__(self, **versions: str) -> None:
        self.versions = versions
        self.failure: LorafleetError | None = None
        self.gate: threading.Event | None = None
        self.finds: list[str] = []

    def list_adapters(self) -> list[AdapterListing]:
        self._answer()
        return [self._listing(name) for name in sorted(self.versions)]

    def find(self, name: str) -> AdapterListing:
        self.finds.append(name)
        self._answer()
        if "/" in name:
            raise InvalidRequest("no name", param="model")
        if name not in self.versions:
            raise ModelNotFound("none")
        return self._listing(name)

    def describe(self, uri: str) -> AdapterListing:
        return self.find(uri.removeprefix("src/"))

    def _answer(self) -> None:
        if self.gate is not None:
            self.gate.wait(5)
        if self.failure is not None:
            raise self.failure

    def _listing(self, name: str) -> AdapterListing:
        return AdapterListing(name, f"src/{name}", self.versions[name], ())


def build(source: FakeSource, path: Path | None = None, **static: str) -> Catalog:
    return Catalog(source, static, source.describe, lambda uri: f"template of {uri}", CatalogState(path))


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=20))


async def names(catalog: Catalog) -> list[str]:
    return [ref.name for ref in (await catalog.wait("test", "", 0)).refs]


async def load(catalog: Catalog, name: str, uri: str, may_replace: bool = False) -> AdapterRef:
    ref = await catalog.propose(name, uri, may_replace)
    await catalog.commit(ref, may_replace)
    return ref


def test_it_holds_what_the_source_the_configuration_and_the_operator_name() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="1", c="1")
        catalog = build(source, named="src/b")
        await catalog.refresh()
        await load(catalog, "loaded", "src/c")
        assert await names(catalog) == ["a", "b", "c", "loaded", "named"]
        assert await catalog.lookup("named") == AdapterRef("named", "src/b", "1")
        assert [ref.name for ref in catalog.preloaded()] == ["named", "loaded"]

    run(main)


def test_a_new_version_in_the_source_is_followed() -> None:
    async def main() -> None:
        source = FakeSource(a="1")
        catalog = build(source)
        await catalog.refresh()
        source.versions["a"] = "2"
        await catalog.refresh()
        assert (await catalog.lookup("a")).version == "2"

    run(main)


def test_what_was_known_stays_while_the_source_is_down() -> None:
    """FR-64."""

    async def main() -> None:
        source = FakeSource(a="1")
        catalog = build(source)
        await catalog.refresh()
        source.failure = DOWN
        await catalog.refresh()
        assert (await catalog.lookup("a")).version == "1"

    run(main)


@pytest.mark.parametrize("failure", [DOWN, AccessDenied("refused")])
def test_an_unseen_name_is_not_called_unknown_while_the_source_cannot_tell(failure: LorafleetError) -> None:
    """FR-64: 503 or 502, not 404."""

    async def main() -> None:
        source = FakeSource()
        source.failure = failure
        catalog = build(source)
        await catalog.refresh()
        with pytest.raises(type(failure)):
            await catalog.lookup("a")
        source.failure = None
        source.versions["a"] = "1"
        assert (await catalog.lookup("a")).version == "1"

    run(main)


def test_an_adapter_can_be_used_right_after_its_upload() -> None:
    async def main() -> None:
        source = FakeSource()
        catalog = build(source)
        await catalog.refresh()
        source.versions["new"] = "1"
        assert await catalog.lookup("new") == AdapterRef("new", "src/new", "1")
        assert await names(catalog) == ["new"]

    run(main)


def test_an_unknown_name_asks_the_source_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-47, FR-64: 404, cached briefly."""

    async def main() -> None:
        source = FakeSource()
        catalog = build(source)
        for _ in range(3):
            with pytest.raises(ModelNotFound):
                await catalog.lookup("junk")
        assert source.finds == ["junk"]
        monkeypatch.setattr(catalog_module, "NEGATIVE_S", -1.0)
        for _ in range(2):
            with pytest.raises(ModelNotFound):
                await catalog.lookup("other")
        assert source.finds == ["junk", "other", "other"]

    run(main)


@pytest.mark.parametrize("name", ["../../etc/x", "/etc/x"])
def test_a_name_that_the_source_refuses_is_unknown(name: str) -> None:
    """FR-30."""

    async def main() -> None:
        with pytest.raises(ModelNotFound):
            await build(FakeSource()).lookup(name)

    run(main)


def test_a_flood_of_junk_names_does_not_reach_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-72."""

    async def main() -> None:
        monkeypatch.setattr(catalog_module, "MAX_PROBES", 2)
        monkeypatch.setattr(catalog_module, "MAX_NEGATIVE", 2)
        source = FakeSource(a="1")
        catalog = build(source)
        await catalog.refresh()
        source.gate = threading.Event()
        lookups = [asyncio.create_task(catalog.lookup(f"junk-{i}")) for i in range(100)]
        await asyncio.sleep(0.05)
        assert sum(task.done() for task in lookups) == 98
        assert (await catalog.lookup("a")).version == "1"
        source.gate.set()
        results = await asyncio.gather(*lookups, return_exceptions=True)
        assert all(isinstance(result, ModelNotFound) for result in results)
        assert len(source.finds) == 2

    run(main)


def test_a_busy_source_that_was_never_listed_is_503() -> None:
    async def main() -> None:
        source = FakeSource()
        source.gate = threading.Event()
        catalog = build(source)
        lookups = [asyncio.create_task(catalog.lookup(f"junk-{i}")) for i in range(catalog_module.MAX_PROBES)]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await catalog.lookup("one-more")
        source.gate.set()
        await asyncio.gather(*lookups, return_exceptions=True)

    run(main)


def test_a_name_is_loaded_once_unless_replaced() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="7")
        catalog = build(source)
        await load(catalog, "x", "src/a")
        with pytest.raises(Conflict):
            await load(catalog, "x", "src/b")
        await load(catalog, "x", "src/b", may_replace=True)
        assert await catalog.lookup("x") == AdapterRef("x", "src/b", "7")

    run(main)


def test_of_two_loads_at_once_one_wins() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1", b="1"))
        first, second = await catalog.propose("x", "src/a", False), await catalog.propose("x", "src/b", False)
        await catalog.commit(first, False)
        with pytest.raises(Conflict):
            await catalog.commit(second, False)

    run(main)


def test_reserved_names_and_empty_places_are_refused() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        with pytest.raises(InvalidRequest):
            await catalog.propose("_base", "src/a", False)
        with pytest.raises(ModelNotFound):
            await catalog.propose("x", "src/none", False)

    run(main)


def test_a_removed_adapter_stays_away_though_the_source_has_it() -> None:
    async def main() -> None:
        source = FakeSource(a="1")
        catalog = build(source, named="src/a")
        await catalog.refresh()
        for name in ("a", "named"):
            await catalog.remove(name)
            await catalog.refresh()
            with pytest.raises(ModelNotFound):
                await catalog.lookup(name)
            with pytest.raises(ModelNotFound):
                await catalog.remove(name)
        assert catalog.preloaded() == []
        await load(catalog, "a", "src/a")
        assert (await catalog.lookup("a")).version == "1"

    run(main)


def test_a_restart_loses_nothing_and_brings_nothing_back(tmp_path: Path) -> None:
    """FR-59: desired adapters are durable."""

    async def main() -> None:
        path = tmp_path / "state" / "catalog.json"
        source = FakeSource(a="1", b="1")
        before = build(source, path)
        await before.refresh()
        await load(before, "loaded", "src/a")
        await load(before, "gone", "src/a")
        await before.remove("gone")
        await before.remove("b")
        after = build(source, path)
        assert (await after.lookup("loaded")).uri == "src/a"
        await after.refresh()
        assert await names(after) == ["a", "loaded"]
        assert await after.lookup("loaded") == AdapterRef("loaded", "src/a", "1")

    run(main)


def test_a_restart_while_the_source_is_down_still_knows_the_names(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "catalog.json"
        source = FakeSource(a="1")
        await load(build(source, path), "loaded", "src/a")
        source.failure = DOWN
        after = build(source, path, named="src/a")
        await after.refresh()
        assert [(await after.lookup(n)).version for n in ("loaded", "named")] == ["", ""]
        source.failure = None
        await after.refresh()
        assert [(await after.lookup(n)).version for n in ("loaded", "named")] == ["1", "1"]

    run(main)


@pytest.mark.parametrize("text", ["", "[]", '{"loaded": 3, "removed": []}', "not json"])
def test_a_foreign_state_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no catalog file"):
        CatalogState(path)


def test_loads_at_once_are_all_in_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "catalog.json"
        catalog = build(FakeSource(a="1"), path)
        await asyncio.gather(*(load(catalog, f"x{i}", "src/a") for i in range(20)))
        assert sorted(CatalogState(path).loaded) == sorted(f"x{i}" for i in range(20))

    run(main)


def test_a_change_wakes_the_views_and_a_load_returns_when_they_have_seen_it() -> None:
    """FR-58: after a load returns, every ingress replica knows the adapter."""

    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        seen: dict[str, Snapshot] = {}

        async def follow(view: str, lag_s: float) -> None:
            snapshot = await catalog.wait(view, "", 0)
            while True:
                seen[view] = snapshot
                snapshot = await catalog.wait(view, snapshot.epoch, snapshot.version)
                await asyncio.sleep(lag_s)

        views = [asyncio.create_task(follow("quick", 0.0)), asyncio.create_task(follow("slow", 0.1))]
        await asyncio.sleep(0.01)
        await load(catalog, "x", "src/a")
        assert [ref.name for ref in seen["slow"].refs] == ["x"]
        await catalog.remove("x")
        assert seen["slow"].refs == seen["quick"].refs == ()
        for view in views:
            view.cancel()

    run(main)


def test_a_dead_view_delays_a_load_by_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(catalog_module, "SEEN_TIMEOUT_S", 0.1)
        catalog = build(FakeSource(a="1"))
        await catalog.wait("dead", "", 0)
        await load(catalog, "x", "src/a")
        assert await names(catalog) == ["x"]

    run(main)


def test_a_view_of_another_catalog_gets_the_whole_state() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        await catalog.refresh()
        assert [ref.name for ref in (await catalog.wait("v", "another", 99)).refs] == ["a"]

    run(main)


def test_a_quiet_catalog_answers_a_view_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(catalog_module, "POLL_S", 0.01)
        catalog = build(FakeSource())
        first = await catalog.wait("v", "", 0)
        assert await catalog.wait("v", first.epoch, first.version) == first

    run(main)


def test_a_template_is_read_once_a_version() -> None:
    async def main() -> None:
        source = FakeSource(a="1")
        reads: list[str] = []
        catalog = Catalog(source, {}, source.describe, lambda uri: reads.append(uri), CatalogState(None))
        await catalog.refresh()
        for _ in range(2):
            assert await catalog.template(await catalog.lookup("a")) is None
        assert reads == ["src/a"]
        source.versions["a"] = "2"
        await catalog.refresh()
        await catalog.template(await catalog.lookup("a"))
        assert len(reads) == 2

    run(main)
