"""Steps that a runner takes before it is ready, so that every kernel is compiled and every buffer taken.

They write on page 0 only, which nobody owns yet, and read whatever lies there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from engine.plan import ScheduledChunk, StepPlan
from engine.sampling_params import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_FILTERED = SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.1)
_EDITED = SamplingParams(temperature=1, frequency_penalty=1.0, logit_bias={0: 1.0}, logprobs=2)
_LENGTHS = (16, 17)  # kernels are compiled anew for integers that 16 divides


def mixed_steps(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, page_tokens: int
) -> Iterator[tuple[StepPlan, SamplingParams]]:
    """The largest step first; each without an adapter and with the one in slot 0."""

    def fit(lengths: Sequence[int]) -> list[int]:
        """As much of it as a step may have."""
        budget = max_num_batched_tokens
        fitting = []
        for length in lengths[:max_num_seqs]:
            fitting.append(min(length, max_model_len, budget))
            budget -= fitting[-1]
        return [length for length in fitting if length]

    largest = [max_model_len] * max_num_seqs
    small = [[length, 1] for length in _LENGTHS]
    for slot in (-1, 0):
        for lengths in [largest, *small]:
            yield _plan(fit(lengths), slot, page_tokens), _GREEDY
    for params in (_FILTERED, _EDITED):
        for num_seqs in (1, 2):
            yield _plan(fit([2] * num_seqs), -1, page_tokens), params
    yield _plan(fit([1] * max_num_seqs), -1, page_tokens), _EDITED  # logits of all are copied


def _plan(lengths: list[int], slot: int, page_tokens: int) -> StepPlan:
    chunks = tuple(
        ScheduledChunk(
            request_id=f"warm-up-{i}",
            start=0,
            token_ids=(0,) * length,
            page_ids=array("i", [0]) * -(-length // page_tokens),
            adapter_slot=slot,
            samples=True,
        )
        for i, length in enumerate(lengths)
    )
    return StepPlan((), (), (), chunks, (), (), ())
