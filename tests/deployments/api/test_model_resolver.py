"""Names of models in requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from deployments.api.model_resolver import ModelResolver
from engine.errors import Unavailable
from tests.deployments.api.fake_fleet import BASE, FakeFleet

pytestmark = pytest.mark.anyio

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
]
every_route = pytest.mark.parametrize(("path", "body"), REQUESTS)


@every_route
@pytest.mark.parametrize(
    "model", ["", "nope", "org/nope", f"{BASE}:nope", f"{BASE}:", "other:sql", "a" * 10_000]
)
async def test_unknown_model_is_a_404_before_any_event(
    fleet: FakeFleet, path: str, body: dict[str, Any], model: str
) -> None:
    """FR-47, FR-72."""
    fleet.catalog.add("sql")
    async with fleet.client() as client:
        answer = await client.post(path, json={**body, "model": model})
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert len(answer.content) < 400
    assert not fleet.service.requests


async def test_a_flood_of_junk_names_changes_no_series(fleet: FakeFleet) -> None:
    """FR-72."""
    fleet.catalog.add("sql")
    async with fleet.client() as client:
        before = (await client.get("/metrics")).text
        for model in (*(f"junk-{i}" for i in range(100)), "x" * 10_000, "../junk"):
            answer = await client.post("/v1/completions", json={"prompt": "hi", "model": model})
            assert answer.status_code in (400, 404)
        assert (await client.get("/metrics")).text == before
    assert "lorafleet_ingress_requests_total" in before


@every_route
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": 5}])
async def test_missing_model_is_a_400(
    fleet: FakeFleet, path: str, body: dict[str, Any], model: dict[str, Any]
) -> None:
    """FR-47."""
    async with fleet.client() as client:
        answer = await client.post(path, json={**body, **model})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    "model",
    [
        "../../etc/x", "/etc/passwd", "a/../b", "a//b", "a/", "./a", ".hidden", "%2e%2e/x", "a\x00b", "a\nb",
        "a\\b", "a b", "ä", f"{BASE}:../x", f"{BASE}:/x",
    ],
)  # fmt: skip
async def test_name_outside_the_grammar_is_a_400_and_never_looked_up(fleet: FakeFleet, model: str) -> None:
    """FR-30."""
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": model})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert not fleet.catalog.resolved


@every_route
@pytest.mark.parametrize("model", ["sql", f"{BASE}:sql", "alias:sql"])
async def test_adapter_answers_under_its_own_name(
    fleet: FakeFleet, path: str, body: dict[str, Any], model: str
) -> None:
    """FR-47."""
    fleet.catalog.add("sql")
    async with fleet.client(model_names=(BASE, "alias", "tag:v1")) as client:
        answer = await client.post(path, json={**body, "model": model})
    adapter = fleet.service.requests[0].adapter
    assert adapter is not None
    assert adapter.name == "sql"
    assert '"model":"sql"' in answer.text.replace('": "', '":"')


@pytest.mark.parametrize("model", [BASE, "alias", "tag:v1"])
async def test_every_base_name_means_the_base(fleet: FakeFleet, model: str) -> None:
    async with fleet.client(model_names=(BASE, "alias", "tag:v1")) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": model})
    assert answer.json()["model"] == model
    assert fleet.service.requests[0].adapter is None


async def test_base_name_may_hold_a_colon(fleet: FakeFleet) -> None:
    fleet.catalog.add("sql")
    async with fleet.client(model_names=("tag:v1",)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": "tag:v1:sql"})
    assert answer.json()["model"] == "sql"


async def test_catalog_that_cannot_tell_is_a_503_and_not_a_404(fleet: FakeFleet) -> None:
    """FR-58."""
    fleet.catalog.failure = Unavailable("starting", retry_after_s=2)
    async with fleet.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": "sql"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


async def test_a_canary_answers_its_part_and_is_named_in_what_it_answers(fleet: FakeFleet) -> None:
    fleet.catalog.add("sql")
    await fleet.catalog.load_canary("sql", "v2", 0.25)
    draws = iter(number / 100 for number in range(100))
    resolver = ModelResolver((BASE,), fleet.catalog, lambda: next(draws))
    answered = Counter([(await resolver.resolve("sql")).name for _ in range(100)])
    assert answered == {"sql": 75, "sql@canary": 25}
    assert (await resolver.find("sql")).name == "sql"
    assert (await resolver.resolve(BASE)).name == BASE
    async with fleet.client() as client:
        assert (await client.get("/v1/models/sql")).json()["canary_weight"] == 0.25
        answer = await client.post("/v1/completions", json={"prompt": "hi", "model": "sql@canary"})
    assert answer.status_code == 400
