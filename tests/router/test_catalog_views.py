"""What happens by itself in a catalog: views are told of changes, what failed is tried again."""

from __future__ import annotations

import asyncio

import pytest

from router import catalog_views
from router.catalog import Catalog
from router.catalog_entry import Snapshot
from router.catalog_state import CatalogState
from router.catalog_upkeep import Status, Upkeep
from tests.router.test_catalog import FakeFleet, FakeSource, build, names, run


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
        await catalog.load("x", "src/a", False)
        assert [entry.ref.name for entry in seen["slow"].entries] == ["x"]
        await catalog.remove("x")
        assert seen["slow"].entries == seen["quick"].entries == ()
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
        assert await catalog.wait("v", first.epoch, first.version) == first

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
        upkeep.failed("x", "u", "gone", now)
        due = next(t for t in range(1000) if upkeep.due(now + t))
        waits.append(due)
        now += due
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert upkeep.status("x") == Status("failed", "gone")
    upkeep.succeeded("x", "u", "1", now)
    assert upkeep.status("x") == Status("ready")
    upkeep.want({"x": "elsewhere"})
    upkeep.succeeded("x", "u", "1", now)  # too late
    assert (upkeep.status("x"), upkeep.version("x")) == (Status("pending"), "")
