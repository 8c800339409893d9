"""Turns one choice's tokens into text deltas and ends it at a stop string. Pure: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.request import FinishReason, OutputDelta, TokenLogprob
from engine.sampling_params import SamplingParams


class Detokenizer(Protocol):
    def add(self, token_ids: Sequence[int]) -> str: ...
    def flush(self) -> str: ...


class StopMatch(NamedTuple):
    stop: str
    start: int  # of the stop string in the text
    end: int


class OutputProcessor:
    """The engine ends a choice at stop tokens and max_tokens; this ends it at stop strings.

    Once `finished` is true without the engine having given a finish_reason, the caller has to abort the
    choice there. Tokens that cross the abort are ignored, so text and counts do not depend on how the
    tokens were grouped.

    Text that may be the beginning of a stop string is held back. Token ids and log-probabilities are not:
    they are the record of what the model did, the tokens of the stop string included.
    """

    def __init__(
        self, index: int, params: SamplingParams, detokenizer: Detokenizer, num_prompt_tokens: int
    ) -> None:
        self.finished = False
        self._index = index
        self._params = params
        self._detokenizer = detokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._held = ""  # detokenized, not sent

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
        num_cached_tokens: int = 0,
    ) -> OutputDelta | None:
        """The engine's next tokens of this choice; None after the end.

        With finish_reason "stop" the last token is the EOS or stop token that ended it, and gives no text
        unless the parameters ask for it.
        """
        if self.finished:
            return None
        text, match, num_used = "", None, 0
        for token_id in token_ids:
            num_used += 1
            self._num_output_tokens += 1
            is_end = finish_reason == "stop" and num_used == len(token_ids)
            silent = is_end and not self._params.include_stop_str_in_output
            sent, match = self._release("" if silent else self._detokenizer.add([token_id]))
            text += sent
            if match:
                break
        if match is None and finish_reason is not None:
            sent, match = self._release(self._detokenizer.flush())
            text += sent + self._held
        self.finished = match is not None or finish_reason is not None
        return OutputDelta(
            index=self._index,
            text=text,
            token_ids=tuple(token_ids[:num_used]),
            logprobs=None if logprobs is None else tuple(logprobs[:num_used]),
            finish_reason="stop" if match else finish_reason,
            stop_reason=match.stop if match else stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def _release(self, new_text: str) -> tuple[str, StopMatch | None]:
        """What can be sent of the held and the new text, and the stop string that ends it there."""
        if not self._params.stop:
            return new_text, None
        num_searched = len(self._held)
        self._held += new_text
        if self._num_output_tokens >= self._params.min_tokens:
            match = find_stop(self._held, self._params.stop, num_searched)
            if match:
                end = match.end if self._params.include_stop_str_in_output else match.start
                text, self._held = self._held[:end], ""
                return text, match
        num_sent = len(self._held) - num_held_back(self._held, self._params.stop)
        text, self._held = self._held[:num_sent], self._held[num_sent:]
        return text, None


def find_stop(text: str, stops: Sequence[str], num_searched: int = 0) -> StopMatch | None:
    """The stop string that is complete first, and at the same place the longest: pieces do not matter.

    One that ends within the first `num_searched` characters is not looked for.
    """
    matches = []
    for stop in stops:
        start = text.find(stop, max(0, num_searched + 1 - len(stop)))
        if start >= 0:
            matches.append(StopMatch(stop, start, start + len(stop)))
    return min(matches, key=lambda match: (match.end, match.start), default=None)


def num_held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    longest = max(map(len, stops), default=1) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)
