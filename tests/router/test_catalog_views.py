"""What happens by itself in a catalog: views are told of changes, what failed is tried again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from router import catalog_views
from router.catalog import Catalog
from router.catalog_entry import Entry
from router.catalog_state import CatalogState
from router.catalog_upkeep import Status, Upkeep
from tests.router.catalog_fakes import FakeFleet, FakeSource, build, names, run


def test_a_change_wakes_the_views_and_a_load_returns_when_they_have_seen_it() -> None:
    """FR-58: after a load returns, every ingress replica knows the adapter."""

    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        seen: dict[str, Mapping[str, Entry]] = {}

        async def follow(view: str, lag_s: float) -> None:
            snapshot = await catalog.wait(view, "", 0)
            while True:
                seen[view] = snapshot.applied_to(seen.get(view, {}))
                snapshot = await catalog.wait(view, snapshot.epoch, snapshot.version)
                await asyncio.sleep(lag_s)

        views = [asyncio.create_task(follow("quick", 0.0)), asyncio.create_task(follow("slow", 0.1))]
        await asyncio.sleep(0.01)
        await catalog.load("x", "src/a", False)
        assert list(seen["slow"]) == list(seen["quick"]) == ["x"]
        await catalog.remove("x")
        assert seen["slow"] == seen["quick"] == {}
        for view in views:
            view.cancel()

    run(main)


def test_a_dead_view_delays_a_load_by_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(catalog_views, "SEEN_TIMEOUT_S", 0.1)
        catalog = build(FakeSource(a="1"))
        await catalog.wait("dead", "", 0)
        await catalog.load("x", "src/a", False)
        assert await names(catalog) == ["x"]

    run(main)


def test_a_view_of_another_catalog_gets_the_whole_state() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1"))
        await catalog.refresh()
        assert [e.ref.name for e in (await catalog.wait("v", "another", 99)).entries] == ["a"]

    run(main)


def test_a_quiet_catalog_answers_a_view_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(catalog_views, "POLL_S", 0.01)
        catalog = build(FakeSource())
        first = await catalog.wait("v", "", 0)
        quiet = await catalog.wait("v", first.epoch, first.version)
        assert quiet == replace(first, is_whole=False)
        held = first.applied_to({})
        assert quiet.applied_to(held) is held

    run(main)


def test_a_view_is_told_what_has_changed_and_everything_if_it_missed_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten thousand adapters are not sent again because one has come; any order of changes adds up."""
    monkeypatch.setattr(catalog_views, "MAX_LOGGED", 8)
    rng = random.Random(0)

    async def main() -> None:
        source = FakeSource()
        catalog = build(source)
        await catalog.refresh()
        told: dict[int, Mapping[str, Entry]] = {0: {}}  # the whole state at each version
        first = await catalog.wait("v", "", 0)
        source.versions.update(a="1", b="1", c="1")
        for _ in range(40):
            name = rng.choice("abcdef")
            if rng.random() < 0.4:
                source.versions.pop(name, None)
            else:
                source.versions[name] = str(rng.random())
            await catalog.refresh()
            whole = await catalog.wait("v", "", 0)
            assert whole.is_whole
            told[whole.version] = whole.applied_to({})
            for version, before in told.items():
                if version == whole.version:
                    continue
                news = await catalog.wait("v", first.epoch, version)
                assert news.is_whole == (whole.version - version > 8)
                assert news.applied_to(before) == told[whole.version]
        assert list(told[whole.version]) == sorted(source.versions)

    run(main)


def test_a_template_is_read_once_a_version() -> None:
    async def main() -> None:
        source = FakeSource(a="1")
        reads: list[str] = []
        catalog = Catalog(
            source, {}, source.describe, lambda uri: reads.append(uri), CatalogState(None), FakeFleet(), 9
        )
        await catalog.refresh()
        for _ in range(2):
            assert await catalog.template(await catalog.lookup("a")) is None
        assert reads == ["src/a"]
        source.versions["a"] = "2"
        await catalog.refresh()
        await catalog.template(await catalog.lookup("a"))
        assert len(reads) == 2

    run(main)


def test_a_failing_adapter_is_tried_again_less_and_less_often() -> None:
    upkeep = Upkeep()
    upkeep.want({"x": "u"})
    assert upkeep.status("x") == Status("pending")
    now, waits = 0.0, []
    for _ in range(8):
        upkeep.failed("x", "u", "gone", now, now)
        due = next(t for t in range(1000) if upkeep.due(now + t))
        waits.append(due)
        now += due
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert upkeep.status("x") == Status("failed", "gone")
    upkeep.succeeded("x", "u", "1", now, now)
    assert upkeep.status("x") == Status("ready")
    upkeep.want({"x": "elsewhere"})
    upkeep.succeeded("x", "u", "1", now, now)  # too late
    assert (upkeep.status("x"), upkeep.version("x")) == (Status("pending"), "")
