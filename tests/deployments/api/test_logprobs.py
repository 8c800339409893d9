"""Log probabilities as clients see them."""

from __future__ import annotations

import json
import math

from deployments.api.logprobs import chat_logprobs, completion_logprobs
from engine.request import TokenLogprob
from tests.deployments.api.fake_fleet import FakeTokenizer

EMOJI = "🎉".encode()


def chosen(token_ids: bytes) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -1.0, ((token_id, -1.0),)) for token_id in token_ids]


def test_part_of_a_character_is_shown_as_its_bytes() -> None:
    """FR-50."""
    fields = chat_logprobs(FakeTokenizer(), chosen(b"a" + EMOJI))
    assert [token["token"] for token in fields["content"]] == [
        "a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8e", "bytes:\\x89",
    ]  # fmt: skip
    assert bytes(byte for token in fields["content"] for byte in token["bytes"]).decode() == "a🎉"


def test_offsets_count_characters_and_not_bytes() -> None:
    """FR-50."""
    fields, num_chars = completion_logprobs(FakeTokenizer(), chosen(b"a" + EMOJI + b"b"))
    assert fields["text_offset"] == [0, 1, 1, 1, 1, 2]
    assert num_chars == len("a🎉b")


def test_offsets_go_on_where_the_piece_before_ended() -> None:
    tokenizer = FakeTokenizer()
    _, num_chars = completion_logprobs(tokenizer, chosen(EMOJI[:2]))
    fields, num_chars = completion_logprobs(tokenizer, chosen(EMOJI[2:] + b"b"), num_chars)
    assert fields["text_offset"] == [0, 0, 1]
    assert num_chars == len("🎉b")


def test_impossible_token_is_still_json() -> None:
    fields, _ = completion_logprobs(FakeTokenizer(), [TokenLogprob(97, -math.inf, ((98, -math.inf),))])
    assert json.loads(json.dumps(fields, allow_nan=False))["token_logprobs"] == [-9999.0]


def test_chosen_token_is_among_the_rivals_even_if_it_is_not_one_of_the_best() -> None:
    fields, _ = completion_logprobs(FakeTokenizer(), [TokenLogprob(97, -3.0, ((98, -0.1),))])
    assert fields["top_logprobs"] == [{"b": -0.1, "a": -3.0}]
