"""What holds for every route: error objects, request ids, body limits; and the small routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import EngineDead, Overloaded, Unavailable
from engine.request import GenerateRequest
from tests.deployments.api.fake_fleet import BASE, FakeFleet, FakeService, Step, steps

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
GOOD = {"model": BASE, "prompt": "hi"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b'{"model": ', JSON),
        (b"", JSON),
        (b"[1]", JSON),
        (b"null", JSON),
        (b'{"model": "\xff"}', JSON),
        (b"[" * 100_000, JSON),
        (b'{"n": ' + b"9" * 5000 + b"}", JSON),
        (b'{"model": "acme/base", "prompt": "hi"}', {"content-type": "text/plain"}),
        (b'{"model": "acme/base", "prompt": "hi"}', {}),
    ],
)
async def test_broken_body_is_an_openai_error(
    fleet: FakeFleet, content: bytes, headers: dict[str, str]
) -> None:
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nowhere", 404, "not_found"), ("GET", "/v1/completions", 405, "method_not_allowed")],
)
async def test_unknown_route_is_an_openai_error(
    fleet: FakeFleet, method: str, path: str, status: int, code: str
) -> None:
    async with fleet.client() as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_fault_of_ours_is_a_500_without_its_text(fleet: FakeFleet) -> None:
    fleet.catalog.failure = RuntimeError("at /secret/path")
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json={**GOOD, "model": "sql"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in answer.text


async def test_body_above_the_limit_is_a_413(fleet: FakeFleet) -> None:
    async def undeclared() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 300

    async with fleet.client(max_body_bytes=1000) as client:
        declared = await client.post("/v1/completions", json={**GOOD, "prompt": "x" * 1000})
        streamed = await client.post("/v1/completions", content=undeclared(), headers=JSON)
        small = await client.post("/v1/completions", json=GOOD)
    for answer in (declared, streamed):
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert small.status_code == 200


async def test_well_formed_request_id_is_kept(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json=GOOD, headers={"x-request-id": "trace-1.a_B"})
    assert answer.headers["x-request-id"] == "trace-1.a_B"
    assert answer.json()["id"] == "cmpl-trace-1.a_B"


@pytest.mark.parametrize("request_id", [b"", b"a b", b"a" * 65, b"x;y", b"\xe9"])
async def test_other_request_ids_are_replaced(fleet: FakeFleet, request_id: bytes) -> None:
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json=GOOD, headers=[(b"x-request-id", request_id)])
    assert len(answer.headers["x-request-id"]) == 32


async def test_equal_request_ids_are_two_requests_for_the_engine(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        for _ in range(2):
            await client.post("/v1/completions", json=GOOD, headers={"x-request-id": "same"})
    first, second = fleet.service.requests
    assert first.request_id != second.request_id


async def test_health_follows_the_service(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        well = await client.get("/health")
        fleet.service.health = EngineDead("gone")
        ill = await client.get("/health")
    assert (well.status_code, ill.status_code) == (200, 503)
    assert ill.json()["error"]["code"] == "engine_dead"


async def test_metrics_are_prometheus_text(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        answer = await client.get("/metrics")
    assert answer.text.startswith("lorafleet_up 1\n")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'lorafleet_catalog_kept{kept="file"} 1.0\n' in answer.text
    (*text_string_to_metric_families(answer.text),)  # pages put together are one


async def test_metrics_count_requests_that_no_replica_takes(fleet: FakeFleet) -> None:
    """By how they end, as this ingress saw it."""
    async with fleet.client(ingress_id="i1") as client:
        assert (await client.post("/v1/completions", json={**GOOD, "n": 2})).status_code == 200
        for error in (Unavailable("none"), Overloaded("busy"), Overloaded("busy"), RuntimeError("ours")):
            fleet.service.script = steps(error)
            await client.post("/v1/completions", json=GOOD)
        page = (await client.get("/metrics")).text
    assert ended_in(page) == {"answered": 1, "unavailable": 1, "overloaded": 2, "internal_error": 1}
    assert 'lorafleet_ingress_requests_waiting{ingress="i1"} 0' in page


async def test_the_ingress_has_a_page_that_asks_no_replica(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.catalog.add("sql")
    async with fleet.client(ingress_id="i1") as client:
        await client.post("/v1/completions", json=GOOD)
        whole = (await client.get("/metrics")).text
        monkeypatch.delattr(FakeService, "metrics_text")
        answer = await client.get("/metrics/ingress")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert ended_in(answer.text) == {"answered": 1}
    families = {family.name for family in text_string_to_metric_families(answer.text)}
    assert families == {
        "lorafleet_ingress_requests_waiting",
        "lorafleet_ingress_requests",
        "lorafleet_catalog_adapters",
        "lorafleet_catalog_kept",
    }
    assert whole == f"lorafleet_up 1\n{answer.text}", "the fleet's page is the replicas' and this one"


async def test_metrics_tell_who_waits_and_who_left(fleet: FakeFleet) -> None:
    is_asked, never = asyncio.Event(), asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        is_asked.set()
        yield never

    fleet.service.script = script
    async with fleet.client(ingress_id="i1") as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=GOOD))
        await is_asked.wait()
        waiting = (await client.get("/metrics")).text
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        page = (await client.get("/metrics")).text
    assert 'lorafleet_ingress_requests_waiting{ingress="i1"} 1' in waiting
    assert 'lorafleet_ingress_requests_waiting{ingress="i1"} 0' in page
    assert ended_in(page) == {"left": 1}


def ended_in(page: str) -> dict[str, float]:
    families = text_string_to_metric_families(page)
    (family,) = (one for one in families if one.name == "lorafleet_ingress_requests")
    assert all(sample.labels["ingress"] == "i1" for sample in family.samples)
    ended = {sample.labels["outcome"]: sample.value for sample in family.samples}
    assert ended.keys() >= {"answered", "left", "overloaded", "unavailable", "engine_dead"}
    return {outcome: count for outcome, count in ended.items() if count}


async def test_openapi_describes_the_routes(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= set(paths)
