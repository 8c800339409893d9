"""The catalog over a source in a dictionary: what is desired, what survives, who has seen it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from engine.adapters.source import AdapterListing
from engine.errors import (
    AccessDenied,
    AdapterRefused,
    Conflict,
    InvalidRequest,
    LorafleetError,
    ModelNotFound,
    Unavailable,
)
from engine.request import AdapterRef
from router import catalog_lookup, catalog_upkeep
from router.catalog import Catalog
from router.catalog_state import CatalogState
from router.catalog_store import FileStore
from tests.router.catalog_fakes import DOWN, FakeFleet, FakeSource, build, names, run, states


def test_it_holds_what_the_source_the_configuration_and_the_operator_name() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="1", c="1")
        catalog = build(source, named="src/b")
        await catalog.refresh()
        await catalog.keep_up()
        await catalog.load("loaded", "src/c", False)
        assert await names(catalog) == ["a", "b", "c", "loaded", "named"]
        assert await catalog.lookup("named") == AdapterRef("named", "src/b", "1")
        assert [ref.name for ref in await catalog.preloaded()] == ["named", "loaded"]

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


@pytest.mark.parametrize("failure", [DOWN, InvalidRequest("too many keys", param="uri")])
def test_what_was_known_stays_while_the_source_is_not_listed(
    failure: LorafleetError, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-64."""

    async def main() -> None:
        source = FakeSource(a="1")
        catalog = build(source)
        await catalog.refresh()
        source.failure = failure
        await catalog.refresh()
        assert (await catalog.lookup("a")).version == "1"
        assert f"{failure.message}; what was known stays" in caplog.text

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
        monkeypatch.setattr(catalog_lookup, "NEGATIVE_S", -1.0)
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
        monkeypatch.setattr(catalog_lookup, "MAX_PROBES", 2)
        monkeypatch.setattr(catalog_lookup, "MAX_NEGATIVE", 2)
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


def test_of_a_flood_only_the_latest_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-72: memory must not grow with the names that clients think of."""

    async def main() -> None:
        monkeypatch.setattr(catalog_lookup, "MAX_NEGATIVE", 4)
        source = FakeSource()
        catalog = build(source)
        flood = [f"junk-{i}" for i in range(20)]
        for name in (*flood, "junk-19", "junk-16", "junk-15"):
            with pytest.raises(ModelNotFound):
                await catalog.lookup(name)
        assert source.finds == [*flood, "junk-15"]

    run(main)


def test_a_busy_source_that_was_never_listed_is_503() -> None:
    async def main() -> None:
        source = FakeSource()
        source.gate = threading.Event()
        catalog = build(source)
        lookups = [asyncio.create_task(catalog.lookup(f"junk-{i}")) for i in range(catalog_lookup.MAX_PROBES)]
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
        await catalog.load("x", "src/a", False)
        with pytest.raises(Conflict):
            await catalog.load("x", "src/b", False)
        await catalog.load("x", "src/b", may_replace=True)
        assert await catalog.lookup("x") == AdapterRef("x", "src/b", "7")

    run(main)


def test_while_a_name_is_loaded_its_requests_and_other_loads_are_told_to_come_again() -> None:
    """FR-58: 503 with Retry-After rather than 404; the state is the same for every view."""

    async def main() -> None:
        fleet = FakeFleet()
        fleet.gate = asyncio.Event()
        catalog = build(FakeSource(a="1", b="1"), fleet=fleet)
        first = asyncio.create_task(catalog.load("x", "src/a", False))
        await asyncio.sleep(0.05)
        assert await states(catalog) == {"x": ("loading", None)}
        with pytest.raises(Unavailable) as caught:
            await catalog.lookup("x")
        assert caught.value.retry_after_s
        with pytest.raises(Unavailable):
            await catalog.load("x", "src/b", False)
        with pytest.raises(Unavailable):
            await catalog.remove("x")
        fleet.gate.set()
        await first
        assert await states(catalog) == {"x": ("ready", None)}
        with pytest.raises(Conflict):
            await catalog.load("x", "src/b", False)

    run(main)


def test_a_replacement_that_is_loaded_leaves_the_old_one_serving() -> None:
    async def main() -> None:
        fleet = FakeFleet()
        catalog = build(FakeSource(a="1", b="7"), fleet=fleet)
        await catalog.load("x", "src/a", False)
        fleet.gate = asyncio.Event()
        second = asyncio.create_task(catalog.load("x", "src/b", True))
        await asyncio.sleep(0.05)
        assert (await catalog.lookup("x")).uri == "src/a"
        for call in catalog.remove("x"), catalog.load_canary("x", "src/b", 0.5):
            with pytest.raises(Unavailable):  # not 404: it serves
                await call
        fleet.gate.set()
        await second
        assert (await catalog.lookup("x")).uri == "src/b"

    run(main)


def test_an_adapter_that_the_replicas_refuse_is_not_in_the_catalog() -> None:
    async def main() -> None:
        fleet = FakeFleet()
        fleet.refusals["x"] = AdapterRefused("no DoRA", param="use_dora")
        catalog = build(FakeSource(a="1"), fleet=fleet)
        with pytest.raises(AdapterRefused):
            await catalog.load("x", "src/a", False)
        assert await names(catalog) == []

    run(main)


def test_reserved_names_and_empty_places_are_refused() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        with pytest.raises(InvalidRequest):
            await catalog.load("_base", "src/a", False)
        with pytest.raises(ModelNotFound):
            await catalog.load("x", "src/none", False)
        assert await names(catalog) == []

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
        assert await catalog.preloaded() == []
        await catalog.load("a", "src/a", False)
        assert (await catalog.lookup("a")).version == "1"

    run(main)


def test_a_restart_loses_nothing_and_brings_nothing_back(tmp_path: Path) -> None:
    """FR-59: desired adapters are durable."""

    async def main() -> None:
        path = tmp_path / "state" / "catalog.json"
        source = FakeSource(a="1", b="1")
        before = build(source, path)
        await before.refresh()
        await before.load("loaded", "src/a", False)
        await before.load("gone", "src/a", False)
        await before.remove("gone")
        await before.remove("b")
        after = build(source, path)
        await after.refresh()
        await after.keep_up()
        assert await names(after) == ["a", "loaded"]
        assert await after.lookup("loaded") == AdapterRef("loaded", "src/a", "1")

    run(main)


def test_a_restart_while_the_source_is_down_still_knows_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_upkeep, "RETRY_S", 0.0)

    async def main() -> None:
        path = tmp_path / "catalog.json"
        source = FakeSource(a="1")
        await build(source, path).load("loaded", "src/a", False)
        source.failure = DOWN
        after = build(source, path, named="src/a")
        await after.refresh()
        await after.keep_up()
        assert [(await after.lookup(n)).version for n in ("loaded", "named")] == ["", ""]
        assert (await states(after))["named"] == ("failed", "no answer")
        source.failure = None
        await after.keep_up()
        assert [(await after.lookup(n)).version for n in ("loaded", "named")] == ["1", "1"]

    run(main)


def test_many_who_ask_for_a_new_name_at_once_all_find_it() -> None:
    """More than are looked up at a time; the source is asked once."""

    async def main() -> None:
        source = FakeSource()
        catalog = build(source)
        await catalog.refresh()
        source.versions["a"] = "1"
        source.gate = threading.Event()
        asking = [asyncio.create_task(catalog.lookup("a")) for _ in range(3 * catalog_lookup.MAX_PROBES)]
        await asyncio.sleep(0.05)
        source.gate.set()
        assert set(await asyncio.gather(*asking)) == {AdapterRef("a", "src/a", "1")}
        assert source.finds == ["a"]

    run(main)


def test_a_template_that_many_need_at_once_is_read_once() -> None:
    async def main() -> None:
        reads: list[str] = []
        gate = threading.Event()

        def read(uri: str) -> str:
            gate.wait(5)
            reads.append(uri)
            return "template"

        source = FakeSource(a="1")
        catalog = Catalog(source, {}, source.describe, read, CatalogState(None), FakeFleet(), 9)
        ref = await catalog.lookup("a")
        asking = [asyncio.create_task(catalog.template(ref)) for _ in range(4)]
        await asyncio.sleep(0.05)
        gate.set()
        assert await asyncio.gather(*asking) == ["template"] * 4
        assert await catalog.template(ref) == "template"
        assert reads == ["src/a"]

    run(main)


class SlowSource(FakeSource):
    """What it has looked at it tells when the gate opens."""

    def __init__(self, **versions: str) -> None:
        super().__init__(**versions)
        self.opens = {"find": threading.Event(), "list": threading.Event()}

    def find(self, name: str) -> AdapterListing:
        found = super().find(name)
        self.opens["find"].wait(5)
        return found

    def list_adapters(self) -> list[AdapterListing]:
        listed = super().list_adapters()
        self.opens["list"].wait(5)
        return listed


def test_a_look_at_one_adapter_does_not_replace_what_a_listing_has_told_meanwhile() -> None:
    async def main() -> None:
        source = SlowSource(a="1")
        catalog = build(source)
        looking = asyncio.create_task(catalog.lookup("a"))
        await asyncio.sleep(0.05)
        source.versions["a"] = "2"
        source.opens["list"].set()
        await catalog.refresh()
        source.opens["find"].set()
        assert (await looking).version == "2"

    run(main)


def test_a_listing_that_began_before_an_upload_does_not_forget_it() -> None:
    async def main() -> None:
        source = SlowSource(a="1")
        source.opens["find"].set()
        catalog = build(source)
        listing = asyncio.create_task(catalog.refresh())
        await asyncio.sleep(0.05)
        source.versions["new"] = "1"
        await catalog.lookup("new")
        source.opens["list"].set()
        await listing
        assert await names(catalog) == ["a", "new"]

    run(main)


def test_what_is_listed_and_not_told_yet_is_found_at_once(tmp_path: Path) -> None:
    """The state beside the adapters is slow; to look again and again would not make it faster."""

    async def main() -> None:
        source = FakeSource(a="1")
        state = CatalogState(FileStore(tmp_path / "catalog.json"))
        slow = asyncio.Event()

        async def refresh() -> None:
            await slow.wait()

        state.refresh = refresh  # type: ignore[method-assign]
        catalog = Catalog(source, {}, source.describe, lambda uri: None, state, FakeFleet(), 9)
        refreshing = asyncio.create_task(catalog.refresh())
        await asyncio.sleep(0.05)
        assert (await catalog.lookup("a")).version == "1"
        assert source.finds == ["a"]
        slow.set()
        await refreshing

    run(main)
