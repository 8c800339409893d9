"""What choosing the next token of one choice needs to know of its past. Grows token by token; no torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from engine.sampling_params import SamplingParams


class SamplingState:
    """Costs O(1) a token: penalties need the distinct tokens and their counts, not the whole history."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Iterable[int],
        output_token_ids: Iterable[int] = (),
    ) -> None:
        """`seed`: this choice's own, int64. `output_token_ids`: what a preempted choice has already."""
        self.params = params
        self.seed = seed
        self.num_outputs = 0
        self.bias_token_ids = array("q", params.logit_bias.keys())
        self.bias = array("f", params.logit_bias.values())
        self.seen_token_ids = array("q")  # distinct, of prompt and output
        self.output_counts = array("q")  # of each seen token, in the output
        self._slots: dict[int, int] = {}  # token id -> index in the two arrays above
        if params.penalizes:
            for token_id in prompt_token_ids:
                self._count(token_id, 0)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """A token has been chosen."""
        self.num_outputs += 1
        self.record(token_id)

    def record(self, token_id: int) -> None:
        """A chosen token that `num_outputs` counts already."""
        if self.params.penalizes:
            self._count(token_id, 1)

    def _count(self, token_id: int, occurrences: int) -> None:
        slot = self._slots.setdefault(token_id, len(self.seen_token_ids))
        if slot == len(self.seen_token_ids):
            self.seen_token_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[slot] += occurrences
