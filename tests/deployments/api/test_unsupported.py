"""Fields that are not supported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.api.fake_fleet import BASE, FakeFleet

pytestmark = pytest.mark.anyio

PLAIN = ("/v1/completions", {"model": BASE, "prompt": "hi"})
CHAT = ("/v1/chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "hi"}]})
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (CHAT, "tools", TOOLS),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "echo", True),
        (CHAT, "continue_final_message", True),
        (CHAT, "chat_template", "{{ messages }}"),
        (CHAT, "structured_outputs", {"json": {}}),
        (PLAIN, "suffix", "end"),
        (PLAIN, "best_of", 2),
        (PLAIN, "best_of", 0),
        (PLAIN, "guided_choice", ["a"]),
        (PLAIN, "skip_special_tokens", False),
        (PLAIN, "add_special_tokens", False),
        (PLAIN, "use_beam_search", True),
        (PLAIN, "cache_salt", "tenant"),
    ],
)
async def test_field_that_would_change_the_answer_is_refused_by_name(
    fleet: FakeFleet, route: tuple[str, dict[str, Any]], field: str, value: Any
) -> None:
    path, body = route
    async with fleet.client() as client:
        answer = await client.post(path, json={**body, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": "none"}),
        (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}),
        (CHAT, {"response_format": {"type": "text"}, "modalities": ["text"], "echo": False}),
        (
            CHAT,
            {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "logit_bias": {}},
        ),
        (PLAIN, {"suffix": None, "best_of": 1, "user": "u"}),
        (PLAIN, {"best_of": 3, "n": 3}),
        (PLAIN, {"add_special_tokens": True, "some_gateways_own_field": {"x": 1}}),
    ],
)
async def test_field_that_asks_for_nothing_is_taken(
    fleet: FakeFleet, route: tuple[str, dict[str, Any]], fields: dict[str, Any]
) -> None:
    path, body = route
    async with fleet.client() as client:
        answer = await client.post(path, json={**body, **fields})
    assert answer.status_code == 200
