"""What goes into an engine and what comes out. Frozen values that survive JSON; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as the caller knows it. The engine turns it into a digest when it has read the content."""

    name: str
    uri: str  # directory, or s3://bucket/prefix
    version: str = ""  # changes when the content may have changed (ETags, mtimes); "": ask the source


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: AdapterRef | None = None  # None: the base model
    timeout_s: float | None = None  # the first token is of use only within so many seconds
    is_traced: bool = False  # its first delta tells its milestones


@dataclass(frozen=True, slots=True)
class Milestones:
    """When a request came how far. Seconds of the engine's clock; of the epoch, once they left a replica."""

    arrived: float
    loaded: float  # its adapter's weights were in host memory or in the pool
    started: float  # its first tokens were scheduled
    first_token: float
    tier: str | None  # where its adapter was found: hbm, host, disk or source; None: the base model
    replica: str = ""
    route: str = ""  # why the router chose the replica


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output of one choice. The concatenated texts are the text; the last one has a finish_reason."""

    index: int  # choice, 0 <= index < params.n
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None  # one per token id, if asked for
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_output_tokens: int  # so far, this delta included
    milestones: Milestones | None = None  # in the first one, if asked for


@dataclass(frozen=True, slots=True)
class RequestOutput:
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    adapter: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
