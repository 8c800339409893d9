from __future__ import annotations

import json
from dataclasses import replace

from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.wire import decode_choices, encode_choices, encode_frame, encode_request

REQUEST = GenerateRequest(
    "r#0",
    tuple(range(1000)),
    SamplingParams(seed=7, stop=("a", "b"), stop_token_ids=(3,), logit_bias={5: -1.5}, max_tokens=9),
    AdapterRef("sql", "dir/sql", "1"),
    timeout_s=2.5,
    is_traced=True,
)


def test_choices_arrive_as_they_were_sent_and_their_prompt_goes_once() -> None:
    params = REQUEST.params
    choices = [replace(REQUEST, request_id=f"r#{i}", params=replace(params, seed=i << 40)) for i in range(20)]
    sent = encode_choices(choices)
    assert decode_choices(*json.loads(json.dumps(sent))) == choices
    assert len(encode_frame(sent)) < 1.5 * len(encode_frame(encode_request(REQUEST)))
