"""Turns tokens into text as they come. Knows the tokenizer only by its `decode`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
KEPT_TOKENS = 8
"""Twice the bytes of the longest character: what is older than that cannot become whole any more."""


class Decoder(Protocol):
    @property
    def special_token_ids(self) -> frozenset[int]: ...
    def knows(self, token_id: int) -> bool: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """The concatenated pieces equal `decode(all ids)`, and no character is sent before it is whole.

    A window of the last tokens is decoded, never the whole output:

        forgotten, sent | context, sent | pending tokens |
                        0               num_context      len(window)

    The context stands before the pending tokens because a token's text may depend on its left neighbour.
    Not covered: byte-fallback tokens that are no valid UTF-8, where `decode` turns whole characters before
    them into U+FFFD after the fact.
    """

    def __init__(self, tokenizer: Decoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        self._num_context = 0
        self._num_sent = 0  # characters of the window's text

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that has become final."""
        return "".join(self._add_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """What is left at the end: an incomplete character, as U+FFFD."""
        rest = self._decode(self._window)[self._num_sent :]
        self._window, self._num_context, self._num_sent = [], 0, 0
        return rest

    def _add_one(self, token_id: int) -> str:
        if token_id in self._skipped or not self._tokenizer.knows(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        piece = text[self._num_sent :]
        if not piece:
            return ""
        if not text.endswith(REPLACEMENT):
            self._forget()
            return piece
        # the end of the text may be half a character
        if len(self._window) - self._num_context > 2 * KEPT_TOKENS:
            return self._cut(text)
        return ""

    def _forget(self) -> None:
        """Drop the old context; the pending tokens have been sent and become the context."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._num_sent = len(self._decode(self._window))

    def _cut(self, text: str) -> str:
        """Give up waiting for the older tokens: a long run of them makes no character."""
        old, kept = self._window[:-KEPT_TOKENS], self._window[-KEPT_TOKENS:]
        old_text = self._decode(old)
        # not between two characters: try again after the next token
        if old_text + self._decode(kept) != text:
            return ""
        piece = old_text[self._num_sent :]
        self._window, self._num_context, self._num_sent = kept, 0, 0
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=bool(self._skipped))
