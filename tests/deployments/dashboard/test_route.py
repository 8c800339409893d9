"""The page's routes: what is open, what needs a key, how often the fleet is asked."""

from __future__ import annotations

import re
import time
from typing import Any, get_args

import pytest

from deployments.api.auth import digest_key
from deployments.dashboard.overview import SORTS
from deployments.dashboard.route import FILES, OPEN_PATHS, STATIC, Sort
from tests.deployments.api.fake_fleet import BASE, FakeFleet
from tests.deployments.dashboard.replicas import adapter, replica

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def fleet() -> FakeFleet:
    fake = FakeFleet()
    fake.service.replicas = [replica("r1", sql=adapter(), pirate=adapter(running=1))]
    return fake


async def test_the_page_has_its_files_and_lets_no_other_code_run(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        page = await client.get("/dashboard")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        named = set(re.findall(r'(?:src|href)="(/[^"]+)"', page.text))
        assert named <= OPEN_PATHS
        for name in FILES:
            assert (await client.get(f"/dashboard/{name}")).status_code == 200
        assert (await client.get("/dashboard/uPlot.LICENSE")).status_code == 404
    assert not re.search(r"<script(?![^>]*src)|style=|\son\w+=", page.text), "the policy forbids it"


async def test_data_needs_a_key_and_the_page_does_not(fleet: FakeFleet) -> None:
    async with fleet.client(api_key_digests=(digest_key("secret"),)) as client:
        for path in sorted(OPEN_PATHS):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/dashboard/data")).status_code == 401
        answer = await client.get("/dashboard/data", headers={"authorization": "Bearer secret"})
    assert answer.json()["model"] == BASE


async def test_data_can_be_searched(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        answer = (await client.get("/dashboard/data", params={"search": "pir", "sort": "name"})).json()
        assert [row["name"] for row in answer["adapters"]["rows"]] == ["pirate"]
        for bad in ({"sort": "color"}, {"page": "-1"}, {"search": "x" * 200}):
            assert (await client.get("/dashboard/data", params=bad)).status_code == 400


async def test_a_fleet_without_a_replica_is_data_too(fleet: FakeFleet) -> None:
    fleet.service.replicas = []
    async with fleet.client() as client:
        answer = await client.get("/dashboard/data")
    assert answer.status_code == 200
    assert answer.json()["replicas"] == answer.json()["adapters"]["rows"] == []


async def test_many_open_pages_ask_the_fleet_once(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    stats = fleet.service.stats

    async def count() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return await stats()

    monkeypatch.setattr(fleet.service, "stats", count)
    async with fleet.client() as client:
        for _ in range(5):
            await client.get("/dashboard/data")
    assert asked == 1


async def test_answers_of_several_ingress_replicas_are_on_one_clock(fleet: FakeFleet) -> None:
    """The page makes rates of two answers, which a balancer may have fetched from two machines."""
    async with fleet.client() as client:
        answer = (await client.get("/dashboard/data")).json()
    assert abs(answer["at_s"] - time.time()) < 60.0


def test_orders_are_the_same_in_all_places() -> None:
    assert set(get_args(Sort)) == set(SORTS)
    assert set(re.findall(r'<option value="(\w+)"', (STATIC / "index.html").read_text())) == set(SORTS)
