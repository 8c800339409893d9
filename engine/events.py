"""What comes out of an engine's core: tokens and ends of requests, answers to calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import LorafleetError
from engine.request import FinishReason, Milestones, TokenLogprob


class TokenEvent(NamedTuple):
    """One token of one request, or its end, or both."""

    request_id: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the one of `stop_token_ids` that ended it; EOS is not told
    error: LorafleetError | None = None
    num_cached_tokens: int = 0
    milestones: Milestones | None = None  # with the first token, if asked for


@dataclass(frozen=True, slots=True)
class CallEvent:
    """The answer to `load_adapter` (the load report), `unload_adapter`, `pin_adapter` or `unpin_adapter`."""

    call_id: str
    result: dict[str, Any] | None = None
    error: LorafleetError | None = None


Event = TokenEvent | CallEvent
