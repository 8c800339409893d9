from __future__ import annotations

import json

import pytest

from tests.deployments.api.fake_fleet import BASE, FakeFleet
from tests.pauses import longest_pause_of_tasks

pytestmark = pytest.mark.anyio


async def test_other_requests_go_on_while_a_large_body_is_checked(fleet: FakeFleet) -> None:
    """But while its JSON is parsed, a quarter of the time: that holds the GIL, wherever it is done."""
    messages = [{"role": "user", "content": "hi"}] * 100_000
    body = json.dumps({"model": BASE, "messages": [*messages, {"role": 7}]})
    async with fleet.client() as client:

        async def ask() -> None:
            headers = {"content-type": "application/json"}
            answer = await client.post("/tokenize", content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")

        assert await longest_pause_of_tasks(ask) < 0.7


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ],
)
async def test_openapi_describes_the_bodies(fleet: FakeFleet, path: str, field: str) -> None:
    async with fleet.client() as client:
        described = (await client.get("/openapi.json")).json()["paths"][path]["post"]["requestBody"]
    assert field in described["content"]["application/json"]["schema"]["properties"]
