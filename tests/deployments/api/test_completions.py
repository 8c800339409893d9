"""POST /v1/completions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from deployments.api.protocol import MAX_STOP_TOKEN_IDS
from engine.request import GenerateRequest
from tests.deployments.api.fake_fleet import BASE, BOS, FakeFleet, FakeTokenizer, delta, spell

pytestmark = pytest.mark.anyio


async def post(fleet: FakeFleet, **body: Any) -> httpx2.Response:
    async with fleet.client() as client:
        return await client.post("/v1/completions", json={"model": BASE, "prompt": "hi", **body})


async def test_answer_is_an_openai_text_completion(fleet: FakeFleet) -> None:
    fleet.service.script = spell("Hello", " you", finish="length")
    answer = (await post(fleet)).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", BASE)
    assert answer["choices"] == [
        {"index": 0, "text": "Hello you", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sampling_fields_reach_the_engine(fleet: FakeFleet) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "n": 2, "max_tokens": 9,
        "min_tokens": 3, "include_stop_str_in_output": True, "ignore_eos": True, "frequency_penalty": 0.1,
        "presence_penalty": 0.2, "repetition_penalty": 1.1, "logprobs": 4,
    }  # fmt: skip
    await post(fleet, **fields, stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={"65": -100})
    params = fleet.service.requests[0].params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {65: -100.0}


async def test_the_time_for_the_first_token_reaches_the_engine(fleet: FakeFleet) -> None:
    await post(fleet, timeout_s=2.5)
    await post(fleet)
    assert [request.timeout_s for request in fleet.service.requests] == [2.5, None]
    refused = await post(fleet, timeout_s=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout_s")


async def test_null_means_the_default_and_a_stop_string_needs_no_list(fleet: FakeFleet) -> None:
    await post(fleet, temperature=None, n=None, max_tokens=None, stream=None, stop="x", logit_bias=None)
    params = fleet.service.requests[0].params
    assert (params.temperature, params.n, params.max_tokens, params.stop) == (1.0, 1, 16, ("x",))


async def test_default_of_sixteen_tokens_yields_to_the_room_that_is_left(fleet: FakeFleet) -> None:
    await post(fleet, prompt="x" * 95)
    assert fleet.service.requests[0].params.max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
async def test_every_form_of_prompt_is_taken(fleet: FakeFleet, prompt: Any, token_ids: Any) -> None:
    assert (await post(fleet, prompt=prompt)).status_code == 200
    assert [request.prompt_token_ids for request in fleet.service.requests] == token_ids


async def test_prompt_gets_the_tokenizers_special_tokens(fleet: FakeFleet) -> None:
    fleet.tokenizer = FakeTokenizer(adds_bos=True)
    assert (await post(fleet, prompt="")).status_code == 200
    assert fleet.service.requests[0].prompt_token_ids == (BOS,)


async def test_choices_of_a_batch_are_numbered_over_all_prompts(fleet: FakeFleet) -> None:
    def script(request: GenerateRequest) -> list[Any]:
        prompt = bytes(request.prompt_token_ids).decode()
        return [
            [delta(request, f"{prompt}{index}", index=index, finish="stop", num_cached_tokens=1)]
            for index in (1, 0)
        ]

    fleet.service.script = script
    answer = (await post(fleet, prompt=["a", "b", "c"], n=2)).json()
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"), (4, "c0"), (5, "c1")]
    assert answer["usage"]["prompt_tokens"] == 3  # not once per choice
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert len({request.request_id for request in fleet.service.requests}) == 3


async def test_echo_puts_the_prompt_before_the_text(fleet: FakeFleet) -> None:
    answer = (await post(fleet, prompt=["hi ", "yo "], echo=True)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi ok", "yo ok"]


async def test_logprobs_have_the_legacy_shape(fleet: FakeFleet) -> None:
    fleet.service.script = spell("a", "bc")
    answer = (await post(fleet, logprobs=1)).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"!": -0.5, "a": -1.0}, {"!": -0.5, "b": -1.0}, {"!": -0.5, "c": -1.0}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x" * 100}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, "logprobs"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"top_k": 1 << 31}, "top_k"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [65] * (1 + MAX_STOP_TOKEN_IDS)}, "stop_token_ids"),  # all are copied on the way
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"65": 101}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_value_is_a_400_that_names_it_and_harms_nobody(
    fleet: FakeFleet, body: dict[str, Any], param: str
) -> None:
    """FR-53."""
    async with fleet.client() as client:
        refused = await client.post("/v1/completions", json={"model": BASE, "prompt": "hi", **body})
        health = await client.get("/health")
        normal = await client.post("/v1/completions", json={"model": BASE, "prompt": "hi"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert (health.status_code, normal.status_code) == (200, 200)
    assert len(fleet.service.requests) == 1  # the engine never saw the bad one


@pytest.mark.parametrize("fields", ['"prompt": "\\ud800"', '"prompt": "a", "stop": "\\udfff"'])
async def test_half_a_surrogate_pair_is_refused(fleet: FakeFleet, fields: str) -> None:
    async with fleet.client() as client:
        answer = await client.post(
            "/v1/completions",
            content=f'{{"model": "{BASE}", {fields}}}',
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("prompt", "stop")


async def test_long_prompt_is_encoded_whole(fleet: FakeFleet) -> None:
    async with fleet.client(max_model_len=50_000) as client:
        answer = await client.post("/v1/completions", json={"model": BASE, "prompt": "x" * 20_000})
    assert answer.json()["usage"]["prompt_tokens"] == 20_000


class ThreadTokenizer(FakeTokenizer):
    """Notes in which threads it works."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.threads.add(threading.get_ident())
        return super().decode(token_ids, skip_special_tokens)

    def knows(self, token_id: int) -> bool:
        self.threads.add(threading.get_ident())
        return super().knows(token_id)


@pytest.mark.parametrize("prompt", ["a" * 90, [97] * 90])
async def test_many_prompts_that_are_long_together_hold_up_no_stream(
    fleet: FakeFleet, prompt: str | list[int]
) -> None:
    """256 of 16,000 characters took six seconds, in which no stream of the process moved."""
    fleet.tokenizer = tokenizer = ThreadTokenizer()
    answer = await post(fleet, prompt=[prompt] * 200, max_tokens=1, echo=True)
    assert answer.status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads
    await post(fleet, prompt=[prompt] * 2, max_tokens=1)
    assert threading.get_ident() in tokenizer.threads
