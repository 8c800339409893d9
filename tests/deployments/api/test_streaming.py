"""Streamed answers: what the events are, how a stream ends, and what a client that leaves leaves behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from engine.errors import EngineDead, LorafleetError, Overloaded, Unavailable
from engine.request import GenerateRequest
from tests.deployments.api.asgi_client import Exchange
from tests.deployments.api.fake_fleet import BASE, FakeFleet, Step, delta, spell, steps

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "stream": True},
    PLAIN: {"model": BASE, "prompt": "hi", "stream": True},
}
both = pytest.mark.parametrize("path", [CHAT, PLAIN])


async def post(fleet: FakeFleet, path: str, **body: Any) -> httpx2.Response:
    async with fleet.client() as client:
        return await client.post(path, json={**BODIES[path], **body})


def lines(answer: httpx2.Response) -> list[str]:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


async def chunks(fleet: FakeFleet, path: str, **body: Any) -> list[dict[str, Any]]:
    *events, done = lines(await post(fleet, path, **body))
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@both
async def test_pieces_add_up_to_the_whole_answer(fleet: FakeFleet, path: str) -> None:
    """FR-49."""
    fleet.service.script = spell("He", "", "llo", " you")
    streamed = await chunks(fleet, path, stream_options={"include_usage": True})
    whole = (await post(fleet, path, stream=False)).json()
    text = "".join(text_of(choice) for chunk in streamed for choice in chunk["choices"])
    assert (
        text == "Hello you" == (whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"])
    )
    assert streamed[-1]["usage"] == whole["usage"]


async def test_chat_stream_opens_with_the_role(fleet: FakeFleet) -> None:
    first, *rest = await chunks(fleet, CHAT)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [
        {"delta": {"role": "assistant", "content": ""}, "index": 0, "logprobs": None, "finish_reason": None}
    ]
    assert all("role" not in choice["delta"] for chunk in rest for choice in chunk["choices"])


@both
async def test_every_choice_ends_with_exactly_one_finish_reason(fleet: FakeFleet, path: str) -> None:
    """FR-52."""
    fleet.service.script = spell("a", "b", finish="length")
    streamed = await chunks(fleet, path, n=3)
    ends = [c["index"] for chunk in streamed for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2]
    assert all(chunk["choices"] for chunk in streamed)  # no usage chunk unasked
    assert all("usage" not in chunk for chunk in streamed)


@both
async def test_usage_comes_last_if_asked_for(fleet: FakeFleet, path: str) -> None:
    """FR-52."""
    *others, last = await chunks(fleet, path, n=2, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in others)


@both
async def test_choices_keep_their_indices(fleet: FakeFleet, path: str) -> None:
    """FR-55."""

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(request, f"{index}a", index=index) for index in (2, 0, 1)]
        for index in (1, 2, 0):
            yield [delta(request, f"{index}b", index=index, finish="stop", num_output_tokens=2)]

    fleet.service.script = script
    streamed = await chunks(fleet, path, n=3)
    texts = {0: "", 1: "", 2: ""}
    for chunk in streamed:
        for choice in chunk["choices"]:
            texts[choice["index"]] += text_of(choice)
    assert texts == {0: "0a0b", 1: "1a1b", 2: "2a2b"}


async def test_deltas_of_one_choice_that_come_together_are_one_chunk(fleet: FakeFleet) -> None:
    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(request, "a", num_output_tokens=1), delta(request, "b", num_output_tokens=2)]
        yield [
            delta(request, "c", num_output_tokens=3),
            delta(request, "", finish="stop", num_output_tokens=4, stop_reason="#"),
        ]

    fleet.service.script = script
    first, second = await chunks(fleet, PLAIN, logprobs=0)
    assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["ab", "c"]
    assert first["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]
    assert second["choices"][0]["stop_reason"] == "#"


async def test_echo_opens_every_choice_with_its_prompt(fleet: FakeFleet) -> None:
    streamed = await chunks(fleet, PLAIN, prompt=["hi ", "yo "], echo=True)
    texts = ["", ""]
    for chunk in streamed:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["hi ok", "yo ok"]


@both
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", retry_after_s=2.5), 429, "3"),
        (Unavailable("loading"), 503, "1"),
        (EngineDead("gone", retry_after_s=0.1), 503, "1"),
    ],
)
async def test_error_before_the_first_token_keeps_its_status(
    fleet: FakeFleet, path: str, stream: bool, error: LorafleetError, status: int, retry_after: str
) -> None:
    fleet.service.script = steps(error)
    answer = await post(fleet, path, stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (status, retry_after)
    assert answer.json() == {"error": error.body()}


@both
@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineDead("replica lost"), "engine_dead"),
        (RuntimeError("a path /secret"), "internal_error"),
        (None, "unavailable"),
    ],
)
async def test_failure_after_the_start_is_an_error_event_and_no_end(
    fleet: FakeFleet, path: str, failure: Exception | None, code: str
) -> None:
    """FR-65. None: the engine's stream just stops."""

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(request, "a")]
        if failure is not None:
            yield failure

    fleet.service.script = script
    answer = await post(fleet, path)
    *before, last = lines(answer)
    assert json.loads(last)["error"]["code"] == code
    assert "[DONE]" not in answer.text
    assert "secret" not in answer.text
    assert all(c["finish_reason"] is None for event in before for c in json.loads(event)["choices"])


@both
async def test_abort_by_the_engine_is_an_error_and_no_finish_reason(fleet: FakeFleet, path: str) -> None:
    fleet.service.script = spell("a", "b", finish="abort")
    assert (await post(fleet, path, stream=False)).status_code == 503
    assert "[DONE]" not in (await post(fleet, path)).text


async def test_failure_of_one_prompt_ends_the_whole_batch(fleet: FakeFleet) -> None:
    never = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(request, "a")]
        yield Unavailable("gone") if request.prompt_token_ids == (98,) else never

    fleet.service.script = script
    answer = await post(fleet, PLAIN, prompt=["a", "b", "c"], stream=False)
    assert answer.status_code == 503
    assert fleet.service.num_running == 0


@both
async def test_first_text_leaves_before_the_answer_is_complete(fleet: FakeFleet, path: str) -> None:
    more = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        yield [delta(request, "first")]
        yield more
        yield [delta(request, "second", finish="stop", num_output_tokens=2)]

    fleet.service.script = script
    exchange = Exchange(fleet.app(), path, BODIES[path])
    await exchange.has_sent(2 if path == CHAT else 1)
    assert b"first" in exchange.pieces[-1]
    more.set()
    await exchange.task
    assert exchange.pieces[-1].endswith(b"data: [DONE]\n\n")


@both
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_deltas", [0, 2])
async def test_client_that_leaves_closes_its_request(
    fleet: FakeFleet, path: str, stream: bool, num_deltas: int
) -> None:
    """FR-56."""
    waiting = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        for _ in range(num_deltas):
            yield [delta(request, "a")]
        waiting.set()
        yield asyncio.Event()

    fleet.service.script = script
    exchange = Exchange(fleet.app(), path, {**BODIES[path], "stream": stream})
    await waiting.wait()
    assert fleet.service.num_running == 1
    await exchange.hang_up()
    assert fleet.service.num_running == 0


async def test_clients_that_leave_at_random_leave_nothing_running(fleet: FakeFleet) -> None:
    """FR-56."""
    fleet.service.script = spell(*"abcdefghijklmnopqrst")
    app = fleet.app()
    rng = random.Random(7)
    exchanges = [Exchange(app, PLAIN, {**BODIES[PLAIN], "prompt": ["a", "b"]}) for _ in range(100)]

    async def leave(exchange: Exchange) -> None:
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        await exchange.hang_up()

    await asyncio.gather(*map(leave, exchanges))
    assert fleet.service.num_running == 0
    assert 0 < len(fleet.service.requests) <= 200


async def test_cancelled_handler_closes_its_request(fleet: FakeFleet) -> None:
    """A proxy may cancel the handler's task instead of sending a disconnect."""
    waiting = asyncio.Event()

    def script(request: GenerateRequest) -> Iterator[Step]:
        waiting.set()
        yield asyncio.Event()

    fleet.service.script = script
    exchange = Exchange(fleet.app(), PLAIN, BODIES[PLAIN])
    await waiting.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    assert fleet.service.num_running == 0
