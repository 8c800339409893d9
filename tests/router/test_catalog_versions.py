"""The catalog and its replicas: which versions of its adapters they hold, and for how long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.errors import (
    AdapterRefused,
    LorafleetError,
    ModelNotFound,
    Unavailable,
)
from engine.request import AdapterRef
from router import catalog as catalog_module
from router import catalog_departures, catalog_upkeep
from router.catalog import NO_REPLICA, Catalog
from router.catalog_entry import Canary, canary_name
from tests.router.catalog_fakes import DOWN, FakeFleet, FakeSource, build, names, run, states

READY, PENDING = ("ready", None), ("pending", None)


def test_a_named_adapter_follows_its_object_once_the_replicas_have_the_new_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old one serves until then, and if the new one is refused."""
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)
    monkeypatch.setattr(catalog_upkeep, "RETRY_S", 0.0)

    async def main() -> None:
        source, fleet = FakeSource(a="1"), FakeFleet()
        catalog = build(source, fleet=fleet, x="src/a")
        await catalog.keep_up()
        await catalog.keep_up()
        assert fleet.loaded == [AdapterRef("x", "src/a", "1")]
        source.versions["a"] = "2"
        fleet.refusals["x"] = AdapterRefused("no DoRA", param="use_dora")
        await catalog.keep_up()
        assert (await catalog.lookup("x")).version == "1"
        assert await states(catalog) == {"x": ("failed", "no DoRA")}
        fleet.refusals.clear()
        await catalog.keep_up()
        assert (await catalog.lookup("x")).version == "1", "the same bytes are not tried again"
        source.versions["a"] = "3"
        await catalog.keep_up()
        assert (await catalog.lookup("x")).version == "3"
        assert await states(catalog) == {"x": ("ready", None)}

    run(main)


def test_a_canary_shares_a_name_until_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is durable, follows its object, and while it cannot be had the other version answers alone."""
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)
    monkeypatch.setattr(catalog_upkeep, "RETRY_S", 0.0)

    async def main() -> None:
        path = tmp_path / "catalog.json"
        source, fleet = FakeSource(a="1", b="1", c="1"), FakeFleet()
        await build(source, path, fleet, x="src/a").load_canary("x", "src/b", 0.5)
        catalog = build(source, path, fleet, x="src/a")
        await catalog.refresh()
        await catalog.keep_up()
        (entry,) = [e for e in (await catalog.wait("v", "", 0)).entries if e.ref.name == "x"]
        assert entry.canary == Canary(AdapterRef("x@canary", "src/b", "1"), 0.5)
        assert AdapterRef("x@canary", "src/b", "1") in await catalog.preloaded()

        source.versions["b"] = "2"
        await catalog.refresh()
        await catalog.keep_up()
        assert fleet.loaded[-1] == AdapterRef("x@canary", "src/b", "2")
        fleet.refusals["x@canary"] = AdapterRefused("no DoRA", param="use_dora")
        source.versions["b"] = "3"
        await catalog.refresh()
        await catalog.keep_up()
        assert all(entry.canary is None for entry in (await catalog.wait("v", "", 0)).entries)

        await catalog.load("x", "src/c", True)
        await catalog.keep_up()
        assert await names(catalog) == ["a", "b", "c", "x"]
        with pytest.raises(ModelNotFound) as caught:
            await catalog.load_canary("unknown", "src/b", 0.5)
        assert caught.value.param == "lora_name"
        with pytest.raises(ModelNotFound) as caught:
            await catalog.load_canary("x", "src/none", 0.5)
        assert caught.value.param is None

    run(main)


def test_a_canary_of_a_name_that_is_unloaded_meanwhile_is_not_kept() -> None:
    """Nobody could ask for it, and every replica would hold it."""

    async def main() -> None:
        fleet = FakeFleet()
        catalog = build(FakeSource(a="1", b="1"), fleet=fleet)
        await catalog.load("x", "src/a", False)
        fleet.gate = asyncio.Event()
        canary = asyncio.create_task(catalog.load_canary("x", "src/b", 0.5))
        await asyncio.sleep(0.05)
        await catalog.remove("x")
        fleet.gate.set()
        with pytest.raises(ModelNotFound):
            await canary
        assert await catalog.preloaded() == []

    run(main)


def test_a_fleet_without_a_replica_fails_no_adapter() -> None:
    """While the first ones start, or none is needed. Who starts loads them himself."""

    async def main() -> None:
        fleet = FakeFleet()
        fleet.refusals["x"] = Unavailable("no replica is available", code=NO_REPLICA)
        catalog = build(FakeSource(a="1"), fleet=fleet, x="src/a")
        await catalog.refresh()
        for _ in range(2):
            await catalog.keep_up()
            assert (await states(catalog))["x"] == ("pending", None)
        assert len(fleet.asked) == 1  # not at once again
        assert [ref.version for ref in await catalog.preloaded()] == ["1"]

    run(main)


def test_what_is_loaded_into_a_fleet_without_a_replica_waits_for_one(tmp_path: Path) -> None:
    """Scaled to zero over night, say. A new version too, and a canary."""

    async def main() -> None:
        fleet, source = FakeFleet(), FakeSource(a="1", b="1")
        catalog = build(source, tmp_path / "state", fleet)
        await catalog.load("x", "src/a", False)
        assert await states(catalog) == {"x": READY}
        source.versions["a"] = "2"
        asleep = Unavailable("no replica is available", code=NO_REPLICA)
        fleet.refusals = dict.fromkeys(("x", "y", canary_name("x")), asleep)
        await catalog.load("x", "src/a", True)
        await catalog.load("y", "src/b", False)
        await catalog.load_canary("x", "src/b", 0.5)
        assert await states(catalog) == {"x": PENDING, "y": PENDING}
        assert {(ref.name, ref.version) for ref in await catalog.preloaded()} == {
            ("x", "2"), ("y", "1"), (canary_name("x"), "1"),
        }  # fmt: skip
        fleet.refusals.clear()
        await catalog.keep_up()
        assert await states(catalog) == {"x": READY, "y": READY}
        assert {"x", "y", canary_name("x")} == {ref.name for ref in fleet.loaded[-3:]}
        restarted = build(source, tmp_path / "state")
        await restarted.refresh()
        assert {"x", "y"} <= set(await names(restarted))

    run(main)


def test_an_adapter_that_is_unloaded_as_a_replica_starts_does_not_end_it() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1"), x="src/a")
        starting = asyncio.create_task(catalog.preloaded())
        await asyncio.gather(asyncio.create_task(catalog.remove("x")), starting)
        assert starting.result() == []

    run(main)


def test_one_that_loads_slowly_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many load together, and none twice."""
    monkeypatch.setattr(catalog_module, "UPKEEP_S", 0.01)

    async def main() -> None:
        static = {"a-slow-one": "src/a", **{f"n{index:02}": "src/a" for index in range(20)}}
        fleet = SlowFleet("a-slow-one")
        catalog = build(FakeSource(a="1"), None, fleet, 30, **static)
        upkeep = asyncio.create_task(catalog.run())
        for name in static.keys() - {"a-slow-one"}:
            await until_ready(catalog, name)
        assert (await states(catalog))["a-slow-one"] == ("pending", None)
        assert fleet.most == catalog_module.MAX_UPKEEPS
        fleet.may_end.set()
        await until_ready(catalog, "a-slow-one")
        assert sorted(ref.name for ref in fleet.loaded) == sorted(static)
        upkeep.cancel()

    run(main)


async def until_ready(catalog: Catalog, name: str) -> None:
    snapshot = await catalog.wait("test", "", 0)
    entries = snapshot.applied_to({})
    while entries[name].status.state != "ready":
        snapshot = await catalog.wait("test", snapshot.epoch, snapshot.version)
        entries = snapshot.applied_to(entries)


class SlowFleet(FakeFleet):
    """Loads that adapter when it may end, and the others soon."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.may_end = asyncio.Event()
        self.most = 0  # loads at a time
        self._slow = slow
        self._num_loading = 0

    async def load_adapter(self, ref: AdapterRef) -> None:
        self._num_loading += 1
        self.most = max(self.most, self._num_loading)
        if ref.name == self._slow:
            await self.may_end.wait()
        else:
            await asyncio.sleep(0.02)
        self._num_loading -= 1
        self.loaded.append(ref)


def test_only_so_many_named_adapters_are_kept_on_the_replicas() -> None:
    async def main() -> None:
        fleet = FakeFleet()
        catalog = build(FakeSource(a="1"), fleet=fleet, max_kept=2, x="src/a", y="src/a", z="src/a")
        await catalog.keep_up()
        assert [ref.name for ref in fleet.loaded] == ["x", "y"]
        assert [ref.name for ref in await catalog.preloaded()] == ["x", "y"]
        assert (await states(catalog))["z"] == ("ready", None)

    run(main)


def test_pinned_adapters_of_the_source_are_there_before_a_replica_serves() -> None:
    """FR-66."""

    async def main() -> None:
        source = FakeSource(a="1", b="1")
        catalog = build(source, x="src/b")
        assert [ref.name for ref in await catalog.preloaded(("a", "absent"))] == ["a", "x"]
        source.failure = DOWN
        with pytest.raises(Unavailable):
            await catalog.preloaded(("unheard",))

    run(main)


def test_what_was_deleted_at_the_source_is_unloaded_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-72: replicas and metrics would name it for ever."""

    async def main() -> None:
        source, fleet = FakeSource(a="1", b="1"), FakeFleet()
        catalog = build(source, fleet=fleet)
        await catalog.refresh()
        del source.versions["a"]
        await catalog.refresh()
        await catalog.keep_up()
        assert fleet.unloaded == []  # its files may be being replaced
        monkeypatch.setattr(catalog_departures, "GONE_S", 0.0)
        fleet.failure = DOWN
        await catalog.keep_up()
        fleet.failure = None
        await catalog.keep_up()
        await catalog.keep_up()
        assert fleet.unloaded == ["a"]

    run(main)


def test_a_canary_that_has_ended_is_unloaded_and_one_that_fails_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog_departures, "GONE_S", 0.0)
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)

    async def main() -> None:
        source, fleet = FakeSource(a="1", b="1"), FakeFleet()
        catalog = build(source, fleet=fleet)
        await catalog.load("x", "src/a", False)
        await catalog.load_canary("x", "src/b", 0.5)
        fleet.refusals["x@canary"] = AdapterRefused("no DoRA", param="use_dora")
        source.versions["b"] = "2"
        await catalog.refresh()
        await catalog.keep_up()
        assert all(entry.canary is None for entry in (await catalog.wait("v", "", 0)).entries)
        assert fleet.unloaded == []
        await catalog.load_canary("x", "src/b", 0)
        await catalog.keep_up()
        assert fleet.unloaded == ["x@canary"]

    run(main)


class GatedFleet(FakeFleet):
    """Loads of a version wait for its gate, and fail with what is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, LorafleetError] = {}

    async def load_adapter(self, ref: AdapterRef) -> None:
        if ref.version in self.gates:
            await self.gates[ref.version].wait()
        if ref.version in self.failures:
            raise self.failures[ref.version]
        await super().load_adapter(ref)


@pytest.mark.parametrize("failure", [None, Unavailable("busy")])
def test_a_version_that_is_looked_up_later_is_not_replaced_by_one_whose_load_ends_later(
    failure: Unavailable | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upkeep has begun with the old one when somebody loads the new one by hand; and the other way round."""
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)

    async def main() -> None:
        source, fleet = FakeSource(a="1"), GatedFleet()
        catalog = build(source, fleet=fleet, x="src/a")
        fleet.gates = {"1": asyncio.Event(), "3": asyncio.Event()}
        upkeep = asyncio.create_task(catalog.keep_up())
        await asyncio.sleep(0.05)
        source.versions["a"] = "2"
        await catalog.load("x", "src/a", True)
        fleet.failures = {"1": failure} if failure else {}
        fleet.gates["1"].set()
        await upkeep
        assert (await catalog.lookup("x")).version == "2"
        assert await states(catalog) == {"x": ("ready", None)}

        source.versions["a"] = "3"
        by_hand = asyncio.create_task(catalog.load("x", "src/a", True))
        await asyncio.sleep(0.05)
        source.versions["a"] = "4"
        await catalog.keep_up()
        fleet.gates["3"].set()
        await by_hand
        assert (await catalog.lookup("x")).version == "4"

    run(main)


def test_an_old_listing_is_no_news_of_what_was_loaded_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source lists no more, and tells of single adapters yet."""
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)
    monkeypatch.setattr(catalog_module, "REFRESH_S", 0.0)

    async def main() -> None:
        source, fleet = FakeSource(a="1"), FakeFleet()
        catalog = build(source, fleet=fleet)
        await catalog.refresh()
        source.versions["a"] = "2"
        await catalog.load("x", "src/a", False)
        await catalog.keep_up()
        assert (await catalog.lookup("x")).version == "2"
        assert [ref.version for ref in fleet.loaded] == ["2"]

    run(main)


def test_replicas_that_have_a_new_version_get_the_old_one_back_if_others_fail() -> None:
    """Who is told that it was not replaced finds it as it was."""

    async def main() -> None:
        fleet = GatedFleet()
        catalog = build(FakeSource(a="1", b="2"), fleet=fleet)
        await catalog.load("x", "src/a", False)
        fleet.failures["2"] = Unavailable("a replica does not answer")
        with pytest.raises(Unavailable):
            await catalog.load("x", "src/b", True)
        assert fleet.loaded == [AdapterRef("x", "src/a", "1")] * 2
        assert (await catalog.lookup("x")).uri == "src/a"

    run(main)
