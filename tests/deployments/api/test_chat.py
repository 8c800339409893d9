"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.deployments.api.fake_fleet import BASE, FakeFleet, spell

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


async def post(fleet: FakeFleet, **body: Any) -> httpx2.Response:
    async with fleet.client() as client:
        return await client.post("/v1/chat/completions", json={"model": BASE, "messages": HI, **body})


def prompt_of(fleet: FakeFleet) -> str:
    return bytes(fleet.service.requests[-1].prompt_token_ids).decode()


async def test_the_time_for_the_first_token_reaches_the_engine(fleet: FakeFleet) -> None:
    await post(fleet, timeout_s=2.5)
    assert fleet.service.requests[0].timeout_s == 2.5


async def test_answer_is_an_openai_chat_completion(fleet: FakeFleet) -> None:
    fleet.service.script = spell("Hello", "!")
    answer = (await post(fleet)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", BASE)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("<user>hi<assistant>")


async def test_messages_go_through_the_base_template(fleet: FakeFleet) -> None:
    await post(fleet, messages=[{"role": "system", "content": "be brief"}, *HI])
    assert prompt_of(fleet) == "<system>be brief<user>hi<assistant>"


async def test_generation_prompt_can_be_left_out(fleet: FakeFleet) -> None:
    await post(fleet, add_generation_prompt=False)
    assert prompt_of(fleet) == "<user>hi"


async def test_text_parts_become_one_text(fleet: FakeFleet) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await post(fleet, messages=[{"role": "user", "content": parts}])
    assert prompt_of(fleet) == "<user>a\nb<assistant>"


async def test_assistant_message_may_be_empty(fleet: FakeFleet) -> None:
    await post(fleet, messages=[*HI, {"role": "assistant", "content": None}, *HI])
    assert prompt_of(fleet) == "<user>hi<assistant><user>hi<assistant>"


async def test_answer_may_take_the_rest_of_the_context(fleet: FakeFleet) -> None:
    await post(fleet)
    assert fleet.service.requests[0].params.max_tokens is None


async def test_max_completion_tokens_wins_over_max_tokens(fleet: FakeFleet) -> None:
    await post(fleet, max_tokens=5, max_completion_tokens=6)
    await post(fleet, max_tokens=5)
    assert [request.params.max_tokens for request in fleet.service.requests] == [6, 5]


async def test_logprobs_have_the_chat_shape(fleet: FakeFleet) -> None:
    fleet.service.script = spell("a", "b")
    answer = (await post(fleet, logprobs=True, top_logprobs=1)).json()
    rival = {"token": "!", "logprob": -0.5, "bytes": [33]}
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [rival]},
            {"token": "b", "logprob": -1.0, "bytes": [98], "top_logprobs": [rival]},
        ],
        "refusal": None,
    }


async def test_logprobs_without_rivals(fleet: FakeFleet) -> None:
    answer = (await post(fleet, logprobs=True)).json()
    assert fleet.service.requests[0].params.logprobs == 0
    assert [token["top_logprobs"] for token in answer["choices"][0]["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 100}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
async def test_bad_value_is_a_400_that_names_it(fleet: FakeFleet, body: dict[str, Any], param: str) -> None:
    """FR-53."""
    refused = await post(fleet, **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert not fleet.service.requests


async def test_adapter_without_a_template_gets_the_base_models(fleet: FakeFleet) -> None:
    """FR-57 (i)."""
    fleet.catalog.add("sql")
    assert (await post(fleet, model="sql")).status_code == 200
    assert prompt_of(fleet) == "<user>hi<assistant>"


async def test_adapters_own_template_is_used_for_it_alone(fleet: FakeFleet) -> None:
    """FR-57 (ii)."""
    fleet.catalog.add("own", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    fleet.catalog.add("plain")
    own = (await post(fleet, model="own")).json()
    assert prompt_of(fleet) == "[user]hi"
    assert own["usage"]["prompt_tokens"] == len("[user]hi")
    await post(fleet, model="plain")
    assert prompt_of(fleet) == "<user>hi<assistant>"
    await post(fleet)
    assert prompt_of(fleet) == "<user>hi<assistant>"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
async def test_template_that_fails_is_a_400(fleet: FakeFleet, template: str) -> None:
    """FR-57 (ii)."""
    fleet.catalog.add("own", template)
    refused = await post(fleet, model="own")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages"


async def test_model_without_any_template_is_a_400(fleet: FakeFleet) -> None:
    fleet.tokenizer.chat_template = None
    assert (await post(fleet)).json()["error"]["param"] == "messages"
