"""How the next token is chosen and when a request ends. Checked once, with the field's OpenAI name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.errors import InvalidRequest

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
_INT32_MAX = (1 << 31) - 1  # a GPU's table of settings holds no more
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Raises InvalidRequest, its `param` naming the field."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None  # None: up to the context window
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    frequency_penalty: float = 0.0  # over generated tokens
    presence_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best; of the raw distribution

    def __post_init__(self) -> None:
        _require_range("temperature", self.temperature, 0.0, 100.0)
        _require_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_range("top_k", self.top_k, -1, _INT32_MAX)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("n", self.n, 1, MAX_CHOICES)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.max_tokens is not None:
            _require_range("max_tokens", self.max_tokens, 1, math.inf)
            _require_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _require_range("min_tokens", self.min_tokens, 0, math.inf)
        if self.seed is not None:
            _require_range("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.logprobs is not None:
            _require_range("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop"
            )
        if "" in self.stop:
            raise InvalidRequest("a stop string must not be empty", param="stop")
        for token_id, bias in self.logit_bias.items():
            # written so that NaN fails
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of token {token_id} must be in [-100, 100], got {bias}", param="logit_bias"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SamplingParams:
        """From `to_dict()`, also after JSON, which knows neither tuples nor integer keys."""
        restored = {
            "stop": tuple(data["stop"]),
            "stop_token_ids": tuple(data["stop_token_ids"]),
            "logit_bias": {int(token_id): bias for token_id, bias in data["logit_bias"].items()},
        }
        return SamplingParams(**(data | restored))


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for token ids that the model does not have."""
    check_token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(params.logit_bias, vocab_size, "logit_bias")


def check_token_ids(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token_id}, the vocabulary is 0 to {vocab_size - 1}", param=param
            )


def derive_seed(seed: int, index: int) -> int:
    """The seed of choice `index`, int64: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), one-to-one."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64
    mixed ^= mixed >> 31
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _require_range(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    # written so that NaN fails
    if not (low <= value <= high) or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", param=name)
