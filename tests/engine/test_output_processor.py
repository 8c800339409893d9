"""Stop strings, held-back text and the end of a choice."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.detokenizer import IncrementalDetokenizer
from engine.output_processor import OutputProcessor, find_stop, num_held_back
from engine.request import FinishReason, OutputDelta, TokenLogprob
from engine.sampling_params import SamplingParams
from tests.engine.tiny_tokenizer import byte_level_tokenizer


class Texts:
    """A detokenizer whose token i has the i-th text; `tail` comes with the flush."""

    def __init__(self, texts: Sequence[str], tail: str = "") -> None:
        self._texts = texts
        self._tail = tail

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)

    def flush(self) -> str:
        tail, self._tail = self._tail, ""
        return tail


def processor(texts: Sequence[str], params: SamplingParams, tail: str = "") -> OutputProcessor:
    return OutputProcessor(0, params, Texts(texts, tail), num_prompt_tokens=3)


def feed_all(
    choice: OutputProcessor, num_tokens: int, finish_reason: FinishReason, sizes: Sequence[int] = ()
) -> list[OutputDelta]:
    """All tokens, in groups of the given sizes and then one by one; the last one ends the choice."""
    deltas, start, sizes = [], 0, list(sizes)
    while start < num_tokens:
        end = min(start + (sizes.pop(0) if sizes else 1), num_tokens)
        delta = choice.feed(range(start, end), finish_reason=finish_reason if end == num_tokens else None)
        if delta is not None:
            deltas.append(delta)
        start = end
    return deltas


def joined(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def naive_output(texts: Sequence[str], params: SamplingParams) -> tuple[str, str | None, int]:
    """(text, stop string, number of tokens), one character at a time."""
    text = ""
    for num_tokens, token_text in enumerate(texts, start=1):
        for char in token_text:
            text += char
            ended = [stop for stop in params.stop if text.endswith(stop)]
            if ended and num_tokens >= params.min_tokens:
                stop = max(ended, key=len)
                return (
                    text if params.include_stop_str_in_output else text.removesuffix(stop),
                    stop,
                    num_tokens,
                )
    return text, None, len(texts)


@pytest.mark.parametrize("seed", range(50))
def test_deltas_in_any_groups_make_the_text_up_to_the_stop_string(seed: int) -> None:
    """FR-49: text, usage and reason do not depend on how the tokens were grouped."""
    rng = random.Random(seed)
    for _ in range(40):
        texts = ["".join(rng.choices("abc", k=rng.randrange(4))) for _ in range(rng.randrange(1, 15))]
        stops = {"".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))}
        params = SamplingParams(
            stop=tuple(stops),
            min_tokens=rng.choice([0, 0, 3, 9]),
            include_stop_str_in_output=rng.random() < 0.3,
        )
        text, stop, num_tokens = naive_output(texts, params)
        sizes = [rng.randrange(1, 5) for _ in texts]
        deltas = feed_all(processor(texts, params), len(texts), "length", sizes)
        assert joined(deltas) == text
        assert sum(len(delta.token_ids) for delta in deltas) == deltas[-1].num_output_tokens == num_tokens
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop" if stop else "length", stop)
        assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_no_part_of_a_stop_string_is_ever_sent() -> None:
    """FR-49: the string spans three tokens, and what looks like its beginning comes out once it is not."""
    choice = processor(["Obs. ", "Then Obs", "erv", "ation:", " no"], SamplingParams(stop=("Observation:",)))
    deltas = [choice.feed([i]) for i in range(5)]
    assert [delta and delta.text for delta in deltas] == ["Obs. ", "Then ", "", "", None]
    assert choice.finished
    last = deltas[3]
    assert last is not None
    assert (last.finish_reason, last.stop_reason, last.num_output_tokens) == ("stop", "Observation:", 4)


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort"])
def test_held_text_is_flushed_at_the_end(finish_reason: FinishReason) -> None:
    """FR-49: the text ends in the beginning of a stop string."""
    choice = processor(["so ", "Obs", "</s>"], SamplingParams(stop=("Observation:",)))
    deltas = feed_all(choice, 3, finish_reason)
    eos = "" if finish_reason == "stop" else "</s>"
    assert joined(deltas) == f"so Obs{eos}"
    assert [delta.text for delta in deltas[:2]] == ["so ", ""]
    assert (deltas[-1].finish_reason, deltas[-1].num_output_tokens) == (finish_reason, 3)


def test_an_end_without_a_token_flushes_too() -> None:
    choice = processor(["so Obs"], SamplingParams(stop=("Observation:",)))
    first, last = choice.feed([0]), choice.feed([], finish_reason="abort")
    assert first is not None
    assert last is not None
    assert (first.text, last.text, last.token_ids, last.num_output_tokens) == ("so ", "Obs", (), 1)


def test_half_a_character_at_the_end_is_sent_once() -> None:
    """FR-50."""
    deltas = feed_all(processor(["a", ""], SamplingParams(), tail="\ufffd"), 2, "length")
    assert [delta.text for delta in deltas] == ["a", "\ufffd"]


def test_a_stop_token_gives_no_text_and_is_named() -> None:
    choice = processor(["a", "."], SamplingParams(stop_token_ids=(1,)))
    choice.feed([0])
    last = choice.feed([1], finish_reason="stop", stop_reason=1)
    assert last is not None
    assert (last.text, last.finish_reason, last.stop_reason, last.token_ids) == ("", "stop", 1, (1,))


def test_a_stop_token_gives_its_text_if_asked_for() -> None:
    params = SamplingParams(stop_token_ids=(1,), include_stop_str_in_output=True)
    assert joined(feed_all(processor(["a", "."], params), 2, "stop")) == "a."


def test_a_stop_string_wins_over_the_length_limit() -> None:
    last = feed_all(processor(["a", "END"], SamplingParams(stop=("END",))), 2, "length")[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "END")


def test_tokens_behind_the_stop_string_do_not_count() -> None:
    choice = processor(["a", "END", "b"], SamplingParams(stop=("END",)))
    logprobs = [TokenLogprob(i, -1.0) for i in range(3)]
    delta = choice.feed([0, 1, 2], logprobs, num_cached_tokens=2)
    assert delta == OutputDelta(
        index=0,
        text="a",
        token_ids=(0, 1),
        logprobs=tuple(logprobs[:2]),
        finish_reason="stop",
        stop_reason="END",
        num_prompt_tokens=3,
        num_cached_tokens=2,
        num_output_tokens=2,
    )
    assert choice.feed([2]) is None


def test_a_stop_string_before_min_tokens_is_text() -> None:
    params = SamplingParams(stop=("aab", "a"), min_tokens=3)
    deltas = feed_all(processor(["aa", "x", "c", "a"], params), 4, "length")
    assert (joined(deltas), deltas[-1].stop_reason) == ("aaxc", "a")


def test_a_stop_string_is_found_across_the_bytes_of_a_character() -> None:
    """FR-49 and FR-50 with a real tokenizer: the stop string's emoji is split over tokens."""
    tokenizer = byte_level_tokenizer()
    token_ids = tokenizer.encode("before 🧪🧬 after")
    choice = OutputProcessor(0, SamplingParams(stop=("🧬",)), IncrementalDetokenizer(tokenizer), 1)
    deltas = [choice.feed([token_id]) for token_id in token_ids]
    assert joined([delta for delta in deltas if delta]) == "before 🧪"
    assert choice.finished


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("", ("ab",), 0),
        ("xa", (), 0),
        ("xa", ("ab",), 1),
        ("ab", ("ab",), 0),  # whole: found, not held
        ("aba", ("ab",), 1),
        ("xaa", ("aab", "ab"), 2),
        ("a", ("a",), 0),
        ("ab", ("ab", "longer"), 0),
    ],
)
def test_held_back_is_what_a_stop_string_begins_with(
    text: str, stops: tuple[str, ...], expected: int
) -> None:
    assert num_held_back(text, stops) == expected


def test_the_stop_string_complete_first_is_found_and_the_longest_of_those() -> None:
    assert find_stop("xabcd", ("abcd", "bc", "abc")) == ("abc", 1, 4)
    assert find_stop("xabcd", ("abcd", "bc", "abc"), num_searched=4) == ("abcd", 1, 5)
    assert find_stop("xab", ("abc",)) is None
