"""An answer that is shown whole: a replica that dies in the middle costs its client time, and no error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.api.build import build_api
from deployments.api.settings import ApiSettings
from deployments.ingress_books import IngressBooks
from deployments.wire import encode_deltas, encode_error
from engine.errors import AdapterRefused, EngineDead, LorafleetError, Overloaded, Unavailable
from engine.request import GenerateRequest, OutputDelta
from engine.sampling_params import SamplingParams
from tests.deployments.api.fake_fleet import BASE, FakeCatalog, FakeTokenizer
from tests.deployments.test_fleet_service import DIED, NO_DEPLOYMENT, REQUEST, Handle, service

Items = list[bytes | Exception]


def said(text: str, finish_reason: Any = None, index: int = 0, tokens: int = 1, cached: int = 0) -> bytes:
    """A chunk of one delta. `tokens`: of its choice so far."""
    delta = OutputDelta(index, text, (1,), None, finish_reason, None, 2, cached, tokens)
    return encode_deltas([delta])


DEAD = encode_error(EngineDead("ended"))
LOST = said("lost ", tokens=1, cached=1)
WHOLE: Items = [said("the "), said("answer", "stop", tokens=2)]


def play(
    handle: Handle, request: GenerateRequest = REQUEST, is_streamed: bool = False
) -> tuple[list[str], LorafleetError | None]:
    """The texts that came, and the error that ended them."""
    seen: list[str] = []

    async def main() -> None:
        fleet = service(handle)
        async for deltas in (fleet if is_streamed else fleet.whole).generate(request):
            seen.extend(delta.text for delta in deltas)

    try:
        asyncio.run(main())
    except LorafleetError as error:
        return seen, error
    return seen, None


@pytest.mark.parametrize("end", [*DIED, DEAD, None])
def test_a_replica_lost_after_tokens_is_replaced_and_they_are_dropped(end: bytes | Exception | None) -> None:
    """FR-65. None: its answer just stops."""
    handle = Handle([LOST, LOST, *([] if end is None else [end])], WHOLE)
    assert play(handle) == (["the ", "answer"], None)
    first, second = (call["request"] for call in handle.calls)
    assert first == second


@pytest.mark.parametrize("end", [*DIED, DEAD])
def test_it_is_replaced_once_and_nothing_is_shown(end: bytes | Exception) -> None:
    handle = Handle([LOST, end], [LOST, LOST, end], WHOLE)
    seen, error = play(handle)
    assert (seen, type(error), len(handle.calls)) == ([], EngineDead, 2)
    assert error is not None
    assert error.retry_after_s


@pytest.mark.parametrize(("items", "is_streamed"), [([DEAD], False), ([LOST, DEAD], False), ([DEAD], True)])
def test_only_what_is_left_of_a_requests_time_is_spent_elsewhere(items: Items, is_streamed: bool) -> None:
    """Streamed too, if nothing had come."""
    params = SamplingParams()
    handle = Handle(items, WHOLE)
    assert play(handle, GenerateRequest("id", (1,), params, timeout_s=60.0), is_streamed)[1] is None
    first, second = (call["request"]["timeout_s"] for call in handle.calls)
    assert first == 60.0
    assert 0.0 < second < 60.0

    handle = Handle(items, WHOLE)
    seen, error = play(handle, GenerateRequest("id", (1,), params, timeout_s=1e-9), is_streamed)
    assert (seen, type(error), len(handle.calls)) == ([], EngineDead, 1)


def test_all_choices_of_a_call_are_generated_again() -> None:
    """One that had ended too: its text and the others' come from one replica."""
    handle = Handle(
        [said("x", "stop", index=1), said("x"), DEAD],
        [said("b", "stop", index=1), said("a", "length")],
    )
    request = GenerateRequest("id", (1,), SamplingParams(n=2))
    assert play(handle, request) == (["b", "a"], None)
    assert [call["request"]["params"]["n"] for call in handle.calls] == [2, 2]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (encode_error(AdapterRefused("no DoRA")), AdapterRefused),
        (encode_error(Overloaded("full")), Overloaded),
    ],
)
def test_no_other_error_is_tried_elsewhere(failure: bytes, error: type[LorafleetError]) -> None:
    handle = Handle([LOST, failure], WHOLE)
    seen, raised = play(handle)
    assert (seen, type(raised), len(handle.calls)) == ([], error, 1)


def test_where_no_replica_is_left_its_client_hears_that() -> None:
    assert type(play(Handle([LOST, DEAD], [NO_DEPLOYMENT]))[1]) is Unavailable


def test_a_request_waits_until_its_first_token_and_no_longer() -> None:
    """In the books, although its deltas are held back."""

    async def main() -> None:
        handle, books = Handle(WHOLE), IngressBooks()
        stream = books.counted(service(handle).whole).generate(REQUEST)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert books.num_waiting == 1
        assert await first == []
        assert books.num_waiting == 0
        await stream.aclose()
        assert handle.streams[0].is_cancelled
        assert +books.ended == {"left": 1}

    asyncio.run(main())


CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": BASE, "messages": [{"role": "user", "content": "hi"}]},
    PLAIN: {"model": BASE, "prompt": "hi"},
}


@asynccontextmanager
async def client_of(handle: Handle) -> AsyncIterator[httpx2.AsyncClient]:
    settings = ApiSettings(model_names=(BASE,), max_model_len=100, created=7)
    app = build_api(service(handle), FakeCatalog(), FakeTokenizer(), settings)
    transport = httpx2.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://fleet") as client,
    ):
        yield client


async def ended(client: httpx2.AsyncClient) -> dict[str, float]:
    """How requests ended, by the ingress's books."""
    families = text_string_to_metric_families((await client.get("/metrics/ingress")).text)
    (family,) = (one for one in families if one.name == "lorafleet_ingress_requests")
    return {sample.labels["outcome"]: sample.value for sample in family.samples if sample.value}


def texts(body: dict[str, Any]) -> list[str]:
    return [choice.get("text") or choice["message"]["content"] for choice in body["choices"]]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("end", [DIED[0], DEAD])
def test_a_client_that_does_not_stream_gets_its_answer(path: str, end: bytes | Exception) -> None:
    """FR-65: usage and books know only the answer that came."""

    async def main() -> None:
        async with client_of(Handle([LOST, LOST, LOST, end], WHOLE)) as client:
            answer = await client.post(path, json=BODIES[path])
            assert answer.status_code == 200
            assert texts(answer.json()) == ["the answer"]
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == 2
            assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
            assert await ended(client) == {"answered": 1}

    asyncio.run(main())


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_client_that_streams_is_told_that_its_replica_is_lost(path: str) -> None:
    """FR-65: it has seen the beginning, which another replica may not repeat."""

    async def main() -> None:
        handle = Handle([LOST, DEAD], WHOLE)
        async with client_of(handle) as client:
            answer = await client.post(path, json={**BODIES[path], "stream": True})
            assert "lost " in answer.text
            assert "engine_dead" in answer.text
            assert "[DONE]" not in answer.text
            assert await ended(client) == {"engine_dead": 1}
        assert len(handle.calls) == 1

    asyncio.run(main())


def test_of_many_prompts_only_the_lost_one_is_generated_again() -> None:
    async def main() -> None:
        handle = Handle([LOST, DEAD], [said("bye", "stop")], WHOLE)
        async with client_of(handle) as client:
            answer = await client.post(PLAIN, json={"model": BASE, "prompt": ["a", "b"]})
            assert texts(answer.json()) == ["the answer", "bye"]
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert await ended(client) == {"answered": 2}
        assert [call["request"]["prompt_token_ids"] for call in handle.calls] == [(97,), (98,), (97,)]

    asyncio.run(main())
