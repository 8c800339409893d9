"""Text that comes in pieces equals the text decoded at once (FR-50)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from engine.detokenizer import KEPT_TOKENS, REPLACEMENT, IncrementalDetokenizer
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizer import LINES, byte_fallback_tokenizer, byte_level_tokenizer, wrap

TEXTS = (
    *LINES,
    "😀",
    "😀😀👩‍👩‍👧🏳️‍🌈 and 漢字漢字, then text",
    "the 😀 end",
    "  two  spaces ",
    " ",
    "€uro ‰ ﷽",
    "a literal � in the text",
    "���",
)
BOTH = pytest.mark.parametrize(
    "tokenizer", [byte_level_tokenizer(), byte_fallback_tokenizer()], ids=["bytes", "pieces"]
)


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add([token_id]) for token_id in token_ids), detokenizer.flush()]


class CountingDecoder:
    """A tokenizer that counts the tokens it has to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_token_ids = tokenizer.special_token_ids
        self.knows = tokenizer.knows
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens)


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    """FR-50: no piece has a U+FFFD that the text has not."""
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_whole_with_its_last_token() -> None:
    """FR-50."""
    tokenizer = byte_fallback_tokenizer()
    token_ids = tokenizer.encode("x😀y")[1:]  # without the space before x
    assert pieces_of(tokenizer, token_ids) == ["x", "", "", "", "😀", "y", ""]


def test_plain_text_is_not_held_back() -> None:
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode(LINES[0])
    assert pieces_of(tokenizer, token_ids) == [*(tokenizer.decode([i]) for i in token_ids), ""]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_half_a_character_at_the_end_is_flushed_once(length: int) -> None:
    """FR-50: max_tokens may fall into a character."""
    tokenizer = byte_level_tokenizer()
    token_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    token_ids = [token_of[b"x"], *(token_of[bytes([byte])] for byte in "🧪".encode()[:length])]
    assert pieces_of(tokenizer, token_ids) == ["x", *[""] * length, REPLACEMENT]
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.add(token_ids)
    assert [detokenizer.flush(), detokenizer.flush()] == [REPLACEMENT, ""]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_in_any_groups_make_the_text(seed: int, skip: bool) -> None:
    """Also special tokens, ids beyond the vocabulary and bytes that are no text."""
    rng = random.Random(seed)
    tokenizer = byte_level_tokenizer()
    for _ in range(20):
        # few distinct bytes: whole characters, halves and impossible ones come close together
        choices = rng.sample(range(tokenizer.vocab_size + 5), 6) + tokenizer.encode("😀漢x")
        token_ids = rng.choices(choices, k=rng.randrange(80))
        detokenizer, text, rest = IncrementalDetokenizer(tokenizer, skip), "", list(token_ids)
        while rest:
            size = rng.randrange(4)
            text += detokenizer.add(rest[:size])
            del rest[:size]
        assert text + detokenizer.flush() == tokenizer.decode(token_ids, skip)


@pytest.mark.parametrize("seed", range(20))
def test_any_text_of_byte_fallback_tokens_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_fallback_tokenizer()
    for _ in range(20):
        text = "".join(rng.choices("the fox 😀漢字🏳️é", k=rng.randrange(40)))
        token_ids = tokenizer.encode(text)
        for _ in range(3):
            token_ids.insert(rng.randrange(len(token_ids) + 1), tokenizer.vocab_size + 1)
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    """The text of a token may depend on its left neighbour."""
    fast = FastTokenizer(
        models.WordLevel({"<|begin|>": 0, "<|end|>": 1, "red": 2, "fox": 3}, unk_token="<|end|>")
    )
    assert pieces_of(wrap(fast), [0, 2, 3, 1, 3]) == ["", "red", " fox", "", " fox", ""]


def broken_byte(tokenizer: Tokenizer) -> int:
    """A token that is no text in any company."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")


@BOTH
@pytest.mark.parametrize("kind", ["text", "broken", "special", "unknown"])
def test_work_per_token_is_bounded(tokenizer: Tokenizer, kind: str) -> None:
    token_ids = {
        "text": tokenizer.encode("漢字 and 😀 text. " * 300),
        "broken": [broken_byte(tokenizer)] * 5000,
        "special": [0] * 5000,
        "unknown": [tokenizer.vocab_size] * 5000,
    }[kind]
    decoder = CountingDecoder(tokenizer)
    detokenizer = IncrementalDetokenizer(decoder)
    for token_id in token_ids:
        detokenizer.add([token_id])
    assert decoder.num_decoded < 4 * KEPT_TOKENS * len(token_ids)


@BOTH
def test_a_long_run_of_broken_bytes_is_not_held_to_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    sent = detokenizer.add([broken_byte(tokenizer)] * 100)
    assert 100 - 2 * KEPT_TOKENS <= len(sent) < 100
    assert sent + detokenizer.flush() == REPLACEMENT * 100


def test_broken_bytes_are_not_cut_within_a_character() -> None:
    """Half characters of two bytes, one U+FFFD each: a cut after the first byte would make it two."""
    tokenizer = byte_level_tokenizer()
    token_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    token_ids = [token_of[b"\xe2"], token_of[b"\x98"]] * 50
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids) == REPLACEMENT * 50
