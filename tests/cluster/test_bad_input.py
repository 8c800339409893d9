"""Input that broke other servers, sent to a running one over HTTP; the next request must be answered.

It comes through HAProxy, the front of servers that are open to the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.serve_process import ServeProcess, serving
from tests.tiny import make_adapter, make_parrot

pytestmark = pytest.mark.cluster

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
CYCLE = "a中😀b".encode()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    root = tmp_path_factory.mktemp("bad-input")
    base = make_parrot(root / "base", CYCLE)
    make_adapter(base, root / "adapter", rank=4, targets=["q_proj"], seed=1)
    flags = [
        "--model", str(base), "--lora-modules", f"adapter={root / 'adapter'}", "--max-model-len", "128",
        "--pool-bytes", "8000000", "--proxy", "haproxy", "--api-key", KEY,
    ]  # fmt: skip
    with serving(flags, key=KEY) as process:
        yield process


@pytest.fixture
def client(fleet: ServeProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def still_serving(fleet: ServeProcess) -> Iterator[None]:
    """FR-53: whatever came before, health and a normal request succeed right after."""
    yield
    assert fleet.call("/health").status == 200
    assert fleet.complete("base", prompt="a").status == 200


def chunks(fleet: ServeProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = fleet.call(path, {"stream": True, **body})
    assert answer.status == 200, answer.body
    lines = [line for line in answer.body.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("does-not-exist", 404, "model_not_found"),
        ("", 404, "model_not_found"),
        ("base:does-not-exist", 404, "model_not_found"),
        ("other:adapter", 404, "model_not_found"),
        ("../../etc/passwd", 400, None),
        ("a\n", 400, None),
        ("x" * 10_000, 404, "model_not_found"),
    ],
)
def test_wrong_model(fleet: ServeProcess, model: str, status: int, code: str | None, stream: bool) -> None:
    """FR-30, FR-47, FR-72: never the base model's answer, and the name is not echoed at length."""
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        answer = fleet.call(path, {"model": model, "stream": stream, **body})
        assert answer.status == status, answer.body
        assert answer.body["error"]["param"] == "model"
        assert code is None or answer.body["error"]["code"] == code
        assert len(json.dumps(answer.body)) < 1000


def test_wrong_key(fleet: ServeProcess) -> None:
    """FR-47."""
    assert fleet.call("/v1/models", key="wrong").status == 401
    assert fleet.call("/v1/models").status == 200


def test_missing_model(fleet: ServeProcess) -> None:
    """FR-47."""
    answer = fleet.call(COMPLETIONS, {"prompt": "a"})
    assert (answer.status, answer.body["error"]["param"]) == (400, "model")


def test_openai_client_raises_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.chat.completions.create(
            model="nobody", messages=[{"role": "user", "content": "a"}], stream=True
        )
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("model", ["adapter", "base:adapter"])
def test_answer_names_the_adapter_used(fleet: ServeProcess, model: str) -> None:
    """FR-47."""
    assert fleet.complete(model, prompt="a").body["model"] == "adapter"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [""]}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [999999]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 200}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 200}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}, None),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1000}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999999]}, "stop_token_ids"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, None),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
@pytest.mark.parametrize("model", ["base", "adapter"])
def test_bad_field_is_named(
    fleet: ServeProcess, model: str, path: str, body: dict[str, Any], param: str | None
) -> None:
    """FR-53."""
    answer = fleet.call(path, {"model": model, **body})
    assert answer.status == 400, answer.body
    error = answer.body["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param if param else error["param"]


def test_stop_string_over_several_tokens(fleet: ServeProcess) -> None:
    """FR-49: every character here but a and b is several tokens."""
    body: dict[str, Any] = {"model": "base", "prompt": "a", "max_tokens": 40, "temperature": 0}
    whole = fleet.complete(**body).body["choices"][0]["text"]
    assert whole.startswith("中😀ba中😀b")
    for stop in ("😀ba", "ba中😀", "b"):
        plain = fleet.complete(**body, stop=[stop]).body
        events = chunks(fleet, COMPLETIONS, **body, stop=[stop], stream_options={"include_usage": True})
        assert plain["choices"][0]["text"] == whole[: whole.index(stop)]
        assert text_of(events) == plain["choices"][0]["text"]
        assert plain["choices"][0]["finish_reason"] == "stop"
        assert events[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_held_back_tail_is_flushed(fleet: ServeProcess) -> None:
    """FR-49: the text ends in the beginning of a stop string."""
    body: dict[str, Any] = {"model": "base", "prompt": "a", "max_tokens": 8, "temperature": 0}
    whole = fleet.complete(**body).body["choices"][0]["text"]
    assert text_of(chunks(fleet, COMPLETIONS, **body, stop=[whole[-1] + "?"])) == whole


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_characters_of_several_tokens(fleet: ServeProcess, max_tokens: int, logprobs: int | None) -> None:
    """FR-50: no U+FFFD but in the cut-off tail, nothing repeated, at every place to end."""
    body: dict[str, Any] = {"model": "base", "prompt": "a", "max_tokens": max_tokens, "temperature": 0}
    body["logprobs"] = logprobs
    events = chunks(fleet, COMPLETIONS, **body)
    streamed = text_of(events)
    assert streamed == fleet.complete(**body).body["choices"][0]["text"]
    # bytes come in the order of the cycle, from the one after `a`
    expected = (CYCLE * 2)[1 : max_tokens + 1]
    assert streamed.rstrip("�") == expected.decode(errors="ignore")
    assert len(streamed.rstrip("�")) + 1 >= len(streamed)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_chunk_only_when_asked(fleet: ServeProcess, path: str, include_usage: bool) -> None:
    """FR-52."""
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    events = chunks(fleet, path, model="base", max_tokens=5, n=2, **prompt, **options)
    if include_usage:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 10
        events = events[:-1]
    assert all(event["choices"] for event in events)
    finished = [c["index"] for e in events for c in e["choices"] if c["finish_reason"] is not None]
    assert sorted(finished) == [0, 1]


@pytest.mark.anyio
async def test_cancelled_streams_leave_nothing_behind(fleet: ServeProcess) -> None:
    """FR-56: 100 at once, each closed by its client between connecting and token 20.

    `test_departures.py` does it with 300, ten times over.
    """
    rng = random.Random(0)
    limits = httpx2.Limits(max_connections=100)
    async with httpx2.AsyncClient(headers=HEADERS, limits=limits, timeout=60) as client:
        await asyncio.gather(*(_cancelled(client, fleet.url, rng.randrange(20)) for _ in range(100)))
    async with asyncio.timeout(10):
        while not _is_quiet(fleet):  # noqa: ASYNC110  only the metrics tell
            await asyncio.sleep(0.2)


async def _cancelled(client: httpx2.AsyncClient, url: str, num_tokens: int) -> None:
    model = "adapter" if num_tokens % 2 else "base"
    body = {"model": model, "prompt": "a", "max_tokens": 100, "stream": True}
    if num_tokens == 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post(url + COMPLETIONS, json=body)
        return
    async with client.stream("POST", url + COMPLETIONS, json=body) as response:
        seen = 0
        async for line in response.aiter_lines():
            seen += line.startswith("data:")
            if seen >= num_tokens:
                break


def _is_quiet(fleet: ServeProcess) -> bool:
    page = fleet.call("/metrics").body
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    busy = {"lorafleet_requests_running", "lorafleet_requests_waiting"}
    held = [s for s in samples if s.name in busy or s.labels.get("owner") == "kv"]
    assert len(held) == 3
    return all(s.value == 0 for s in held)


def test_three_choices_with_a_seed(fleet: ServeProcess) -> None:
    """FR-55."""
    body = {"model": "base", "prompt": "a", "n": 3, "seed": 7, "temperature": 2, "max_tokens": 24}
    options = {"stream_options": {"include_usage": True}}
    runs = [chunks(fleet, COMPLETIONS, **body, **options) for _ in range(2)]
    texts = [[text_of(events, index) for index in range(3)] for events in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    for events in runs:
        usage = events[-1]["usage"]
        assert usage["prompt_tokens"] == 1
        assert usage["completion_tokens"] == 72


def test_body_that_is_no_json(fleet: ServeProcess) -> None:
    answer = fleet.call(COMPLETIONS, "not an object")
    assert answer.status == 400
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_adapter_paths_of_the_server_are_not_told(fleet: ServeProcess, tmp_path: Path) -> None:
    """FR-30: loading at run time is off, and says so."""
    answer = fleet.call("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path)})
    assert answer.status in (403, 404)
    assert str(tmp_path) not in json.dumps(answer.body)
