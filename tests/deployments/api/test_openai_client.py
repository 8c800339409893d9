"""The real OpenAI client against the application, in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from deployments.api.auth import digest_key
from engine.errors import Overloaded, Unavailable
from tests.deployments.api.fake_fleet import BASE, FakeFleet, delta, spell, steps

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def openai_client(
    fleet: FakeFleet, api_key: str = "key", **settings: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with fleet.client(**settings) as http_client:
        yield openai.AsyncOpenAI(
            api_key=api_key, base_url="http://fleet/v1", http_client=http_client, max_retries=0
        )


async def test_chat(fleet: FakeFleet) -> None:
    fleet.catalog.add("sql")
    async with openai_client(fleet) as client:
        answer = await client.chat.completions.create(
            model="sql", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
    assert (answer.model, answer.choices[0].message.content) == ("sql", "ok")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [token.token for token in answer.choices[0].logprobs.content] == ["o", "k"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == len("<user>hi<assistant>") + 1


async def test_streamed_chat(fleet: FakeFleet) -> None:
    fleet.service.script = spell("a", "b")
    async with openai_client(fleet) as client:
        stream = await client.chat.completions.create(
            model=BASE,
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["ab", "ab"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_completion_whole_and_streamed(fleet: FakeFleet) -> None:
    async with openai_client(fleet) as client:
        whole = await client.completions.create(model=BASE, prompt=["a", "b"], logprobs=1)
        stream = await client.completions.create(model=BASE, prompt="a", stream=True)
        streamed = [chunk.choices[0].text async for chunk in stream]
    assert [choice.text for choice in whole.choices] == ["ok", "ok"]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 1]
    assert "".join(streamed) == "ok"


async def test_models(fleet: FakeFleet) -> None:
    fleet.catalog.add("sql")
    async with openai_client(fleet) as client:
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("sql")
    assert listed == [BASE, "sql"]
    assert one.id == "sql"


async def test_errors_have_the_clients_own_classes(fleet: FakeFleet) -> None:
    async with openai_client(fleet) as client:
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="nope", prompt="a")
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model=BASE, prompt="a", temperature=-1)
        fleet.service.script = steps(Overloaded("full", retry_after_s=1))
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=BASE, prompt="a")
        fleet.service.script = steps(Unavailable("loading"))
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=BASE, prompt="a", stream=True)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    assert bad.value.param == "temperature"


async def test_error_event_in_a_stream_raises(fleet: FakeFleet) -> None:
    """FR-65."""
    fleet.service.script = lambda request: [[delta(request, "a")], Unavailable("replica lost")]
    async with openai_client(fleet) as client:
        stream = await client.completions.create(model=BASE, prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="replica lost"):
            [chunk async for chunk in stream]


async def test_wrong_key(fleet: FakeFleet) -> None:
    async with openai_client(fleet, "wrong", api_key_digests=(digest_key("right"),)) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.completions.create(model=BASE, prompt="a")
    assert refused.value.code == "invalid_api_key"
