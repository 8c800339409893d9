"""What crosses processes comes out as it went in."""

from __future__ import annotations

import json

import pytest

from deployments.wire import decode_chunk, encode_deltas, encode_error
from engine.errors import Overloaded
from engine.request import Milestones, OutputDelta, TokenLogprob

PLAIN = OutputDelta(0, "naïve 🦊\n", (1, 2), None, None, None, 7, 4, 2)
LOGPROBS = (TokenLogprob(3, -0.25, ((3, -0.25), (9, -1.5))), TokenLogprob(4, -1.0))
FIRST = OutputDelta(
    0, "a", (1,), None, None, None, 7, 0, 1, Milestones(1.5, 2.0, 2.5, 3.0, "disk", "r1", "home")
)
LAST = OutputDelta(1, "", (3, 4), LOGPROBS, "stop", "END", 7, 0, 3)


def test_deltas_survive_the_wire() -> None:
    assert decode_chunk(encode_deltas([FIRST, PLAIN, LAST])) == [FIRST, PLAIN, LAST]


def test_a_chunk_is_a_json_list() -> None:
    assert isinstance(json.loads(encode_deltas([PLAIN])), list)


def test_an_error_survives_the_wire_with_its_status_and_fields() -> None:
    with pytest.raises(Overloaded) as caught:
        decode_chunk(encode_error(Overloaded("full", retry_after_s=2.5, param="model")))
    assert (caught.value.message, caught.value.retry_after_s, caught.value.param) == ("full", 2.5, "model")
    assert caught.value.status == 429
