"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.deployments.api.fake_fleet import BASE, BOS, EOS, FakeFleet, FakeTokenizer

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]


async def post(fleet: FakeFleet, path: str, **body: Any) -> httpx2.Response:
    async with fleet.client() as client:
        return await client.post(path, json=body)


async def test_prompt_becomes_tokens(fleet: FakeFleet) -> None:
    answer = await post(fleet, "/tokenize", model=BASE, prompt="ab")
    assert answer.json() == {"count": 2, "max_model_len": 100, "tokens": [97, 98]}


async def test_special_tokens_are_added_on_demand(fleet: FakeFleet) -> None:
    fleet.tokenizer = FakeTokenizer(adds_bos=True)
    assert (await post(fleet, "/tokenize", prompt="a")).json()["tokens"] == [BOS, 97]
    plain = await post(fleet, "/tokenize", prompt="a", add_special_tokens=False)
    assert plain.json()["tokens"] == [97]


async def test_messages_go_through_the_models_template(fleet: FakeFleet) -> None:
    fleet.tokenizer = FakeTokenizer(adds_bos=True)
    fleet.catalog.add("own", "{% for m in messages %}{{ m.content }}{% endfor %}")
    base = (await post(fleet, "/tokenize", model=BASE, messages=HI, add_generation_prompt=False)).json()
    own = (await post(fleet, "/tokenize", model="own", messages=HI)).json()
    assert bytes(base["tokens"]) == b"<user>hi"
    assert bytes(own["tokens"]) == b"hi"


async def test_tokens_become_text_again(fleet: FakeFleet) -> None:
    answer = await post(fleet, "/detokenize", model=BASE, tokens=[BOS, 97, EOS])
    assert answer.json() == {"prompt": "<s>a</s>"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": BASE}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"model": "nope", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"model": "nope", "tokens": []}, 404, "model"),
        ("/detokenize", {"tokens": [999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_bad_request_names_its_field(
    fleet: FakeFleet, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await post(fleet, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
