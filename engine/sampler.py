"""Chooses the next token of every row of a batch. Knows neither the model nor when a request ends.

    logits -> logit_bias, min_tokens -> penalties -> argmax                                 temperature 0
                                                  -> temperature -> min_p -> top_k -> top_p -> draw
    logits -> log-probabilities, untouched by any of the above

Rows pay only for what they use: a greedy batch is one argmax.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import TokenLogprob
from engine.sampling_state import SamplingState
from kernels.sampling import reference


@dataclass(frozen=True, slots=True)
class SampledTokens:
    token_ids: list[int]
    logprobs: list[TokenLogprob | None]  # None where not asked for


class Sampler:
    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SampledTokens:
        """One token for each row of logits [N, V] float32, which are used up (changed in place).

        Does not append to the states: the caller does, once it has accepted the token.
        """
        scored = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        raw_logprobs = logits[scored].log_softmax(dim=-1) if scored else None
        entries = bias_entries(states, self._eos_token_ids)
        if entries:
            reference.add_bias_(logits, *entries.tensors(torch.float32))
        _penalize(logits, states)
        chosen = _choose(logits, states)
        token_ids: list[int] = chosen.tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(states)
        if raw_logprobs is not None:
            counts = [states[row].params.logprobs or 0 for row in scored]
            for row, logprob in zip(
                scored, _token_logprobs(raw_logprobs, chosen[scored], counts), strict=True
            ):
                logprobs[row] = logprob
        return SampledTokens(token_ids, logprobs)


class Entries:
    """(row, token id, value) triples of a batch, copied from arrays in whole runs."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._lengths: list[int] = []
        self._token_ids = bytearray()
        self._values = bytearray()

    def __bool__(self) -> bool:
        return bool(self._token_ids)

    def add(self, row: int, token_ids: array[int], values: array[float] | array[int]) -> None:
        self._rows.append(row)
        self._lengths.append(len(token_ids))
        self._token_ids += memoryview(token_ids).cast("B")
        self._values += memoryview(values).cast("B")

    def tensors(self, value_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, token ids and values, on the host."""
        rows = torch.tensor(self._rows).repeat_interleave(torch.tensor(self._lengths))
        token_ids = torch.frombuffer(self._token_ids, dtype=torch.int64)
        values = torch.frombuffer(self._values, dtype=value_dtype)
        return rows, token_ids, values


def bias_entries(states: Sequence[SamplingState], eos_token_ids: frozenset[int]) -> Entries:
    """logit_bias, and -inf for the tokens that would end a choice short of its min_tokens."""
    entries = Entries()
    for row, state in enumerate(states):
        params = state.params
        if state.bias:
            entries.add(row, state.bias_token_ids, state.bias)
        if state.num_outputs < params.min_tokens:
            ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
            entries.add(row, array("q", ends), array("f", [-torch.inf]) * len(ends))
    return entries


def _penalize(logits: Tensor, states: Sequence[SamplingState]) -> None:
    entries = Entries()
    for row, state in enumerate(states):
        if state.seen_token_ids:
            entries.add(row, state.seen_token_ids, state.output_counts)
    if entries:
        reference.penalize_(
            logits,
            *entries.tensors(torch.int64),
            repetition=_column([state.params.repetition_penalty for state in states], logits),
            frequency=_column([state.params.frequency_penalty for state in states], logits),
            presence=_column([state.params.presence_penalty for state in states], logits),
        )


def _choose(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    drawn = [row for row, state in enumerate(states) if not state.params.greedy]
    if not drawn:
        return logits.argmax(dim=-1)
    if len(drawn) == len(states):
        return _draw(logits, states)
    chosen = logits.argmax(dim=-1)
    chosen[drawn] = _draw(logits[drawn], [states[row] for row in drawn])
    return chosen


def _draw(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    params = [state.params for state in states]
    vocab_size = logits.shape[1]
    scaled = reference.scale_by_temperature(logits, _column([p.temperature for p in params], logits))
    scaled = _filter(scaled, reference.keep_min_p, {i: p.min_p for i, p in enumerate(params) if p.min_p > 0})
    top_ks = {i: p.top_k for i, p in enumerate(params) if 0 < p.top_k < vocab_size}
    scaled = _filter(scaled, reference.keep_top_k, top_ks)
    scaled = _filter(scaled, reference.keep_top_p, {i: p.top_p for i, p in enumerate(params) if p.top_p < 1})
    # few numbers, so made on the CPU: the same bits on every device
    uniforms = reference.philox_uniform(
        torch.tensor([state.seed for state in states]), torch.tensor([state.num_outputs for state in states])
    )
    return reference.choose(scaled, uniforms.to(logits.device))


def _filter(
    logits: Tensor, keep: Callable[[Tensor, Tensor], Tensor], values: dict[int, float] | dict[int, int]
) -> Tensor:
    """`keep` applied with each row's value, to these rows only."""
    if not values:
        return logits
    column = torch.tensor(list(values.values()), device=logits.device)
    if len(values) == len(logits):
        return keep(logits, column)
    rows = list(values)
    logits[rows] = keep(logits[rows], column)
    return logits


def _token_logprobs(logprobs: Tensor, chosen: Tensor, counts: Sequence[int]) -> list[TokenLogprob]:
    """One for each row of raw log-probabilities [R, V], with the row's count of best tokens."""
    of_chosen = logprobs.gather(1, chosen[:, None])[:, 0]
    k = min(max(counts), logprobs.shape[1])
    top = reference.top_logprobs(logprobs, k)
    rows = zip(
        chosen.tolist(),
        of_chosen.tolist(),
        top.token_ids.tolist(),
        top.logprobs.tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprob(token_id, logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for token_id, logprob, top_ids, top_values, count in rows
    ]


def _column(values: list[float], logits: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=logits.device)
