"""What an engine refuses: shown with its reason, and not tried again until there are other bytes."""

from __future__ import annotations

import pytest

from engine.errors import AdapterRefused
from engine.request import AdapterRef
from router import catalog_upkeep
from router.catalog import Catalog
from router.catalog_refusals import Refusals
from router.catalog_state import CatalogState
from tests.router.catalog_fakes import FakeFleet, FakeSource, build, run, states

NO_DORA = AdapterRefused("no DoRA", param="use_dora")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is due again at once."""
    monkeypatch.setattr(catalog_upkeep, "FOLLOW_S", 0.0)
    monkeypatch.setattr(catalog_upkeep, "RETRY_S", 0.0)


def test_a_refusal_is_of_one_version_at_one_place() -> None:
    refusals = Refusals()
    ref = AdapterRef("x", "src/a", "1")
    assert refusals.add(ref, NO_DORA)
    assert not refusals.add(ref, NO_DORA)
    for same in (ref, AdapterRef("y", "src/a", "1")):
        found = refusals.get(same)
        assert found is not None
        assert found.error().body() == NO_DORA.body()
    for other in (AdapterRef("x", "src/a", "2"), AdapterRef("x", "src/b", "1"), AdapterRef("x", "src/a", "")):
        assert refusals.get(other) is None
    assert not refusals.add(AdapterRef("x", "src/b", ""), NO_DORA), "the next version would be taken for it"
    refusals.keep({"src/b"})
    assert refusals.get(ref) is None
    refusals.add(ref, NO_DORA)
    refusals.forget("src/a")
    assert refusals.get(ref) is None


def test_a_found_adapter_that_a_replica_refuses_is_failed_until_its_object_changes() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="1")
        catalog = build(source)
        await catalog.refresh()
        ref = await catalog.lookup("a")
        await catalog.refused(ref, NO_DORA)
        await catalog.refresh()
        assert await states(catalog) == {"a": ("failed", "no DoRA"), "b": ("ready", None)}
        with pytest.raises(AdapterRefused) as caught:
            await catalog.lookup("a")
        assert caught.value.param == "use_dora"
        source.versions["a"] = "2"
        await catalog.refresh()
        assert (await states(catalog))["a"] == ("ready", None)
        assert (await catalog.lookup("a")).version == "2"
        await catalog.refused(ref, NO_DORA)  # a late word about the bytes before
        assert (await states(catalog))["a"] == ("ready", None)

    run(main)


@pytest.mark.usefixtures("impatient")
def test_a_named_adapter_that_is_refused_is_loaded_once_a_version(caplog: pytest.LogCaptureFixture) -> None:
    """No retry storm: every look at it finds the same bytes."""

    async def main() -> None:
        source, fleet = FakeSource(a="1"), FakeFleet()
        fleet.refusals["x"] = NO_DORA
        catalog = build(source, fleet=fleet, x="src/a")
        for _ in range(5):
            await catalog.keep_up()
        assert fleet.asked == [AdapterRef("x", "src/a", "1")]
        assert await states(catalog) == {"x": ("failed", "no DoRA")}
        with pytest.raises(AdapterRefused):
            await catalog.lookup("x")
        source.versions["a"] = "2"
        for _ in range(5):
            await catalog.keep_up()
        assert [ref.version for ref in fleet.asked] == ["1", "2"]
        assert await states(catalog) == {"x": ("failed", "no DoRA")}
        fleet.refusals.clear()
        source.versions["a"] = "3"
        await catalog.keep_up()
        assert await states(catalog) == {"x": ("ready", None)}

    run(main)
    assert len([record for record in caplog.records if "is refused" in record.message]) == 2


@pytest.mark.usefixtures("impatient")
def test_a_refused_canary_leaves_all_requests_to_the_version_that_serves() -> None:
    async def main() -> None:
        source = FakeSource(a="1", b="1")
        catalog = build(source, x="src/a")
        await catalog.keep_up()
        await catalog.load_canary("x", "src/b", 0.5)
        (entry,) = (await catalog.wait("v", "", 0)).entries
        assert entry.canary is not None
        await catalog.refused(entry.canary.ref, NO_DORA)
        await catalog.keep_up()
        (entry,) = (await catalog.wait("v", "", 0)).entries
        assert (entry.canary, entry.status.state) == (None, "ready")

    run(main)


def test_who_loads_a_refused_adapter_by_hand_has_it_tried_and_its_success_counts() -> None:
    """Say, after replicas were started with a larger rank."""

    async def main() -> None:
        source, fleet = FakeSource(a="1"), FakeFleet()
        catalog = build(source, fleet=fleet)
        await catalog.refresh()
        await catalog.refused(await catalog.lookup("a"), NO_DORA)
        await catalog.load("a", "src/a", may_replace=True)
        assert await states(catalog) == {"a": ("ready", None)}
        assert (await catalog.lookup("a")).version == "1"

    run(main)


def test_a_pinned_adapter_that_is_refused_does_not_keep_a_replica_from_serving() -> None:
    async def main() -> None:
        catalog = build(FakeSource(a="1", b="1"))
        await catalog.refresh()
        await catalog.refused(await catalog.lookup("a"), NO_DORA)
        assert [ref.name for ref in await catalog.preloaded(("a", "b"))] == ["b"]

    run(main)


def test_a_template_that_cannot_be_read_is_a_refusal_too() -> None:
    async def main() -> None:
        source = FakeSource(a="1")
        reads: list[str] = []

        def read(uri: str) -> str | None:
            reads.append(uri)
            raise AdapterRefused("tokenizer_config.json is not JSON", param="tokenizer_config.json")

        catalog = Catalog(source, {}, source.describe, read, CatalogState(None), FakeFleet(), 9)
        await catalog.refresh()
        with pytest.raises(AdapterRefused):
            await catalog.template(await catalog.lookup("a"))
        with pytest.raises(AdapterRefused):
            await catalog.lookup("a")
        assert await states(catalog) == {"a": ("failed", "tokenizer_config.json is not JSON")}
        assert reads == ["src/a"]

    run(main)


def test_a_load_right_after_an_upload_takes_the_new_bytes() -> None:
    """Not those that the last listing has told of."""

    async def main() -> None:
        source, fleet = FakeSource(a="1"), FakeFleet()
        catalog = build(source, fleet=fleet)
        await catalog.refresh()
        await catalog.refused(await catalog.lookup("a"), NO_DORA)
        source.versions["a"] = "2"
        await catalog.load("a", "src/a", may_replace=True)
        await catalog.load_canary("a", "src/a", 0.5)
        assert [ref.version for ref in fleet.loaded] == ["2", "2"]
        assert (await catalog.lookup("a")).version == "2"

    run(main)
