"""Two ingress replicas' views of one catalog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from deployments import catalog_view
from deployments.catalog_view import CatalogView
from deployments.service import AdapterRecord
from engine.errors import AdapterRefused, Conflict, ModelNotFound, Unavailable
from engine.request import AdapterRef
from router.catalog import Catalog
from router.catalog_entry import Entry, Snapshot
from tests.router.catalog_fakes import DOWN, FakeFleet, FakeSource, build


class Link:
    """The way to the catalog; it can be cut, and it counts what goes over it."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.is_cut = False
        self.calls: list[str] = []

    def _pass(self, name: str) -> Catalog:
        self.calls.append(name)
        if self.is_cut:
            raise Unavailable("cut")
        return self.catalog

    async def lookup(self, name: str) -> AdapterRef:
        return await self._pass("lookup").lookup(name)

    async def template(self, ref: AdapterRef) -> str | None:
        return await self._pass("template").template(ref)

    async def load(self, name: str, uri: str, may_replace: bool) -> None:
        await self._pass("load").load(name, uri, may_replace)

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        await self._pass("load_canary").load_canary(name, uri, weight)

    async def remove(self, name: str) -> None:
        await self._pass("remove").remove(name)

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot:
        return await self._pass("wait").wait(view, epoch, version)


@asynccontextmanager
async def views(source: FakeSource) -> AsyncIterator[tuple[CatalogView, CatalogView, Link, FakeFleet]]:
    fleet = FakeFleet()
    catalog = build(source, fleet=fleet)
    await catalog.refresh()
    link = Link(catalog)
    one, two = CatalogView(link), CatalogView(link)
    tasks = [asyncio.create_task(view.run()) for view in (one, two)]
    await asyncio.sleep(0.01)
    yield one, two, link, fleet
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def names(view: CatalogView, prefix: str = "", after: str = "", limit: int = 99) -> list[str]:
    return [record.ref.name for record in await view.list(prefix, after, limit)]


def test_a_load_through_one_ingress_is_known_to_all_when_it_returns() -> None:
    """FR-58."""

    async def main() -> None:
        async with views(FakeSource(a="1")) as (one, two, _, fleet):
            await one.load("x", "src/a", replace=False)
            assert await names(one) == await names(two) == ["a", "x"]
            assert fleet.loaded == [AdapterRef("x", "src/a", "1")]
            for view in (one, two):
                assert (await view.resolve("x")).ref == AdapterRef("x", "src/a", "1")
            await two.unload("x")
            assert await names(one) == ["a"]
            assert fleet.unloaded == ["x"]
            with pytest.raises(ModelNotFound):
                await one.resolve("x")

    asyncio.run(main())


def test_a_known_name_resolves_without_a_call() -> None:
    async def main() -> None:
        async with views(FakeSource(a="1")) as (one, _, link, _):
            await one.resolve("a")
            link.calls.clear()
            record = await one.resolve("a")
            assert record == AdapterRecord(AdapterRef("a", "src/a", "1"), "template of src/a", "a")
            assert "lookup" not in link.calls
            assert "template" not in link.calls

    asyncio.run(main())


def test_what_was_known_survives_a_catalog_that_restarts_while_its_source_is_down() -> None:
    """FR-59, FR-64: the new one has read nothing yet. What is gone goes when it has."""

    async def main() -> None:
        source = FakeSource(a="1", b="1")
        async with views(source) as (one, _, link, _):
            await one.resolve("a")
            source.failure = DOWN
            link.catalog = build(source, named="src/b")
            await link.catalog.refresh()

            async def seen_again() -> None:
                one._take(await link.wait("one", one._epoch, one._version))

            await seen_again()
            assert await names(one) == ["a", "b", "named"]
            assert (await one.resolve("a")).ref.version == "1"
            source.failure = None
            del source.versions["a"]
            await link.catalog.refresh()
            await seen_again()
            assert await names(one) == ["b", "named"]

    asyncio.run(main())


def test_a_canary_whose_template_cannot_be_had_takes_no_request_with_it() -> None:
    async def main() -> None:
        async with views(FakeSource(a="1", b="1")) as (one, _, link, _):
            await one.load_canary("a", "src/b", 0.5)
            assert (await one.resolve("a")).canary is not None
            one._templates.clear()
            template = link.catalog.template

            async def gone(ref: AdapterRef) -> str | None:
                if ref.uri == "src/b":
                    raise ModelNotFound("its files were deleted")
                return await template(ref)

            link.catalog.template = gone  # type: ignore[method-assign]
            record = await one.resolve("a")
            assert (record.ref.uri, record.canary) == ("src/a", None)
            assert record.chat_template == "template of src/a"

    asyncio.run(main())


def test_the_place_that_clients_see_is_no_path_of_the_server() -> None:
    """FR-30."""

    async def main() -> None:
        async with views(FakeSource(a="1")) as (one, _, _, _):
            assert [record.root for record in await one.list("", "", 9)] == ["a"]

    asyncio.run(main())


def test_what_is_known_survives_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-59: and a new one is followed as soon as it is there."""

    async def main() -> None:
        monkeypatch.setattr(catalog_view, "RECONNECT_S", 0.01)
        source = FakeSource(a="1")
        async with views(source) as (one, two, link, _):
            await one.resolve("a")
            link.is_cut = True
            await link.catalog.load("wake", "src/a", False)
            await asyncio.sleep(0.03)
            assert (await one.resolve("a")).ref.name == "a"
            with pytest.raises(Unavailable):
                await one.resolve("unheard")
            source.versions = {"b": "1"}
            link.catalog = build(source)
            await link.catalog.refresh()
            link.is_cut = False
            await asyncio.sleep(0.05)
            assert await names(one) == await names(two) == ["b"]

    asyncio.run(main())


def test_a_taken_name_is_refused_before_any_replica_loads_it() -> None:
    async def main() -> None:
        async with views(FakeSource(a="1", b="1")) as (one, two, _, fleet):
            await one.load("x", "src/a", replace=False)
            with pytest.raises(Conflict):
                await two.load("x", "src/b", replace=False)
            assert len(fleet.loaded) == 1
            await two.load("x", "src/b", replace=True)
            assert (await one.resolve("x")).ref.uri == "src/b"

    asyncio.run(main())


def test_a_canary_comes_with_its_name_and_goes_with_it() -> None:
    async def main() -> None:
        async with views(FakeSource(a="1", b="7")) as (one, two, _, _):
            await one.load_canary("a", "src/b", 0.1)
            canary = (await two.resolve("a")).canary
            assert canary is not None
            assert canary.weight == 0.1
            assert canary.record == AdapterRecord(
                AdapterRef("a@canary", "src/b", "7"), "template of src/b", "b"
            )
            assert await names(two) == ["a", "b"]
            await two.load_canary("a", "src/b", 0.0)
            assert (await one.resolve("a")).canary is None

    asyncio.run(main())


def test_a_name_that_is_loaded_is_503_everywhere_and_shown_so() -> None:
    """FR-58."""

    async def main() -> None:
        async with views(FakeSource(a="1")) as (one, two, _, fleet):
            fleet.gate = asyncio.Event()
            loading = asyncio.create_task(one.load("x", "src/a", replace=False))
            await asyncio.sleep(0.05)
            for view in (one, two):
                assert {record.ref.name: record.state for record in await view.list("x", "", 9)} == {
                    "x": "loading"
                }
                assert view.facts().states == {"ready": 1, "loading": 1}
                with pytest.raises(Unavailable) as caught:
                    await view.resolve("x")
                assert caught.value.retry_after_s
            fleet.gate.set()
            await loading
            assert (await two.resolve("x")).state == "ready"

    asyncio.run(main())


def test_a_list_is_sorted_and_holds_what_was_asked_for() -> None:
    async def main() -> None:
        everything = {"a": "1", "a-b": "1", "ab": "1", "abc": "1", "b": "1", "B": "1"}
        async with views(FakeSource(**everything)) as (one, _, _, _):
            ordered = sorted(everything)
            assert await names(one) == ordered
            for prefix in ("", "a", "ab", "abcd", "b", "z"):
                matching = [name for name in ordered if name.startswith(prefix)]
                for after in ("", *ordered, "aa", "zz"):
                    for limit in (1, 2, 9):
                        expected = [name for name in matching if name > after][:limit]
                        assert await names(one, prefix, after, limit) == expected

    asyncio.run(main())


def test_what_an_engine_refused_is_shown_and_asked_of_nobody_until_it_changes() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="1")
        async with views(source) as (one, two, link, _):
            refusal = AdapterRefused("no DoRA", param="use_dora")
            await link.catalog.refused((await one.resolve("a")).ref, refusal)
            await asyncio.sleep(0.01)
            link.calls.clear()
            for view in (one, two):
                record = await view.resolve("a")
                assert (record.state, record.reason) == ("failed", "no DoRA")
                assert record.refusal is not None
                assert record.refusal.body() == refusal.body()
                assert view.facts().states == {"failed": 1, "ready": 1}
            assert "template" not in link.calls
            source.versions["a"] = "2"
            await link.catalog.refresh()
            await asyncio.sleep(0.01)
            record = await two.resolve("a")
            assert (record.state, record.refusal) == ("ready", None)

    asyncio.run(main())


def test_a_request_has_its_own_versions_template_when_a_newer_one_comes_meanwhile() -> None:
    """It waits for its canary's; by then nobody else needs that of the version beside it."""

    async def main() -> None:
        source = FakeSource(a="1", b="1", c="1")
        async with views(source) as (view, _, link, _):
            await link.catalog.load("x", "src/a", False)
            await link.catalog.load_canary("x", "src/b", 0.5)
            gate = asyncio.Event()

            async def late_template(ref: AdapterRef) -> str:
                if ref.uri == "src/b":
                    await gate.wait()
                return f"template of {ref.uri}"

            link.template = late_template  # type: ignore[method-assign]
            asking = asyncio.create_task(view.resolve("x"))
            await asyncio.sleep(0.01)
            await link.catalog.load("x", "src/c", True)
            await asyncio.sleep(0.01)
            gate.set()
            record = await asking
            assert (record.ref.uri, record.chat_template) == ("src/a", "template of src/a")
            assert record.canary is not None
            assert record.canary.record.chat_template == "template of src/b"

    asyncio.run(main())


def test_a_view_goes_on_after_an_answer_that_it_cannot_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the log tells what was wrong with it."""
    monkeypatch.setattr(catalog_view, "RECONNECT_S", 0.01)
    applied_to = Snapshot.applied_to
    faults = [ValueError("not understood")]

    def fail_once(snapshot: Snapshot, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        if faults:
            raise faults.pop()
        return applied_to(snapshot, entries)

    async def main() -> None:
        source = FakeSource(a="1")
        async with views(source) as (one, two, link, _):
            monkeypatch.setattr(Snapshot, "applied_to", fail_once)
            source.versions["b"] = "1"
            await link.catalog.refresh()
            await asyncio.sleep(0.1)
            assert await names(one) == await names(two) == ["a", "b"]

    asyncio.run(main())
    assert "not understood" in caplog.text
