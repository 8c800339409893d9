"""What crosses processes comes out as it went in."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from deployments.wire import decode_chunk, decode_request, encode_deltas, encode_error, encode_request
from engine.errors import InvalidRequest, Overloaded
from engine.request import AdapterRef, GenerateRequest, OutputDelta, TokenLogprob
from engine.sampling_params import SamplingParams

PLAIN = OutputDelta(0, "naïve 🦊\n", (1, 2), None, None, None, 7, 4, 2)
LOGPROBS = (TokenLogprob(3, -0.25, ((3, -0.25), (9, -1.5))), TokenLogprob(4, -1.0))
LAST = OutputDelta(1, "", (3, 4), LOGPROBS, "stop", "END", 7, 0, 3)


def test_deltas_survive_the_wire() -> None:
    assert decode_chunk(encode_deltas([PLAIN, LAST])) == [PLAIN, LAST]


def test_a_chunk_is_a_json_list() -> None:
    assert isinstance(json.loads(encode_deltas([PLAIN])), list)


def test_an_error_survives_the_wire_with_its_status_and_fields() -> None:
    with pytest.raises(Overloaded) as caught:
        decode_chunk(encode_error(Overloaded("full", retry_after_s=2.5, param="model")))
    assert (caught.value.message, caught.value.retry_after_s, caught.value.param) == ("full", 2.5, "model")
    assert caught.value.status == 429


@pytest.mark.parametrize("adapter", [None, AdapterRef("sql", "s3://b/sql", "v1")])
def test_a_request_survives_the_wire(adapter: AdapterRef | None) -> None:
    changed: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "max_tokens": 9,
        "min_tokens": 1, "stop": ("a", "b"), "stop_token_ids": (5,), "include_stop_str_in_output": True,
        "ignore_eos": True, "frequency_penalty": 0.1, "presence_penalty": 0.2, "repetition_penalty": 1.1,
        "logit_bias": {7: -1.5}, "logprobs": 3,
    }  # fmt: skip
    assert set(changed) == {f.name for f in fields(SamplingParams)}
    request = GenerateRequest("id", (1, 2, 3), SamplingParams(**changed), adapter)
    assert decode_request(encode_request(request)) == request


def test_bad_parameters_are_refused_on_the_other_side_too() -> None:
    data = encode_request(GenerateRequest("id", (1,), SamplingParams()))
    data["params"]["top_p"] = 7.0
    with pytest.raises(InvalidRequest) as caught:
        decode_request(data)
    assert caught.value.param == "top_p"
