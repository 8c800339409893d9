"""GET /v1/models: what is told of the base model and its adapters, whole and in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.api import models_route
from engine.errors import AdapterRefused
from tests.deployments.api.fake_fleet import BASE, FakeFleet

pytestmark = pytest.mark.anyio

NAMES = (
    "alias",
    "a",
    "a-b",
    "ab",
    "b",
    "tenant/a",
    "tenant/b",
    "z",
)  # "alias": as the base model's second name


async def test_models_list_the_base_first_and_adapters_by_name(fleet: FakeFleet) -> None:
    """FR-58."""
    for name in ("b", "a"):
        fleet.catalog.add(name)
    async with fleet.client(model_names=(BASE, "alias"), root="/models/base") as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/a")).json()
        qualified = (await client.get(f"/v1/models/{BASE}:a")).json()
        base = (await client.get(f"/v1/models/{BASE}")).json()
    assert [card["id"] for card in listed["data"]] == [BASE, "alias", "a", "b"]
    assert base == listed["data"][0]
    assert base == {
        "id": BASE, "object": "model", "created": 7, "owned_by": "lorafleet", "root": "/models/base",
        "parent": None, "max_model_len": 100,
    }  # fmt: skip
    assert one == qualified == {**base, "id": "a", "root": "root/a", "parent": BASE, "state": "ready"}


async def test_unknown_model_has_no_card(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        answer = await client.get("/v1/models/nope")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "path", ["%2e%2e%2fetc%2fx", "%2fetc%2fpasswd", "a%00b", "a%2f..%2fx", "%252e%252e%2f"]
)
async def test_a_card_is_of_a_name_and_of_no_path(fleet: FakeFleet, path: str) -> None:
    """FR-30."""
    async with fleet.client() as client:
        answer = await client.get(f"/v1/models/{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert not fleet.catalog.resolved


async def pages(fleet: FakeFleet, limit: int, prefix: str = "") -> list[list[str]]:
    """Ids, page by page, as a client follows them."""
    found: list[list[str]] = []
    after = ""
    async with fleet.client(model_names=(BASE, "alias")) as client:
        while True:
            asked: dict[str, Any] = {"limit": limit, "after": after, "prefix": prefix}
            page = (await client.get("/v1/models", params=asked)).json()
            ids = [card["id"] for card in page["data"]]
            assert (page["object"], len(ids) <= limit) == ("list", True)
            assert [page["first_id"], page["last_id"]] == ([ids[0], ids[-1]] if ids else [None, None])
            found.append(ids)
            if not page["has_more"]:
                return found
            assert len(ids) == limit
            after = page["last_id"]


@pytest.mark.parametrize("prefix", ["", "a", "al", "tenant/", "acme/", "tenant/b", "none"])
async def test_pages_make_up_the_whole_each_once_in_the_same_order(fleet: FakeFleet, prefix: str) -> None:
    for name in NAMES:
        fleet.catalog.add(name)
    whole = [id_ for id_ in (BASE, "alias", *sorted(set(NAMES) - {"alias"})) if id_.startswith(prefix)]
    for limit in range(1, len(whole) + 2):
        found = await pages(fleet, limit, prefix)
        assert [id_ for ids in found for id_ in ids] == whole
        assert found == [whole[i : i + limit] for i in range(0, len(whole), limit)] or not whole


async def test_without_a_limit_everything_is_told_a_piece_at_a_time(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_route, "PIECE", 3)
    for name in NAMES:
        fleet.catalog.add(name)
    async with fleet.client() as client:
        whole = (await client.get("/v1/models")).json()
        rest = (await client.get("/v1/models", params={"after": "b"})).json()
    assert [card["id"] for card in whole["data"]] == [BASE, *sorted(NAMES)]
    assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, BASE, "z")
    assert [card["id"] for card in rest["data"]] == ["tenant/a", "tenant/b", "z"]
    assert set(fleet.catalog.lists) == {3}


async def test_a_page_asks_for_no_more_than_it_shows_and_one(fleet: FakeFleet) -> None:
    for i in range(2000):
        fleet.catalog.add(f"a{i:04}")
    async with fleet.client() as client:
        page = (await client.get("/v1/models", params={"limit": 5, "after": "a0500"})).json()
    assert [card["id"] for card in page["data"]] == [f"a0{i}" for i in range(501, 506)]
    assert fleet.catalog.lists == [6]


async def test_a_page_goes_on_behind_a_name_that_is_gone(fleet: FakeFleet) -> None:
    for name in ("a", "b", "d"):
        fleet.catalog.add(name)
    async with fleet.client() as client:
        page = (await client.get("/v1/models", params={"after": "c", "limit": 9})).json()
    assert [card["id"] for card in page["data"]] == ["d"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"limit": "x"}, "limit"),
        ({"after": "a" * 300}, "after"), ({"prefix": "a" * 300}, "prefix"),
    ],
)  # fmt: skip
async def test_what_is_no_page_is_a_400(fleet: FakeFleet, asked: dict[str, Any], param: str) -> None:
    async with fleet.client() as client:
        answer = await client.get("/v1/models", params=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("prefix", ["../", "/etc", "%2e%2e/", "a\x00", "a\n", "\\"])
async def test_a_prefix_is_compared_and_nothing_else(fleet: FakeFleet, prefix: str) -> None:
    """FR-30."""
    fleet.catalog.add("a")
    async with fleet.client() as client:
        page = (await client.get("/v1/models", params={"prefix": prefix})).json()
    assert (page["data"], page["has_more"]) == ([], False)


async def test_what_was_refused_is_listed_with_its_reason_and_asks_no_engine(fleet: FakeFleet) -> None:
    fleet.catalog.add("bad")
    refusal = AdapterRefused("DoRA is not supported", param="use_dora")
    fleet.catalog.records["bad"] = replace(
        fleet.catalog.records["bad"], state="failed", reason=refusal.message, refusal=refusal
    )
    async with fleet.client() as client:
        card = (await client.get("/v1/models/bad")).json()
        listed = (await client.get("/v1/models", params={"prefix": "bad"})).json()
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": "bad", "stream": True})
        metrics = (await client.get("/metrics")).text
    assert (card["state"], card["reason"]) == ("failed", "DoRA is not supported")
    assert listed["data"] == [card]
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "adapter_refused", "use_dora")
    assert not fleet.service.requests
    assert 'lorafleet_catalog_adapters{state="failed"} 1.0' in metrics
    assert 'lorafleet_catalog_kept{kept="file"} 1.0' in metrics
