"""A request's `n` choices: to the engine each is a request of its own; here they become text again."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from engine.detokenizer import IncrementalDetokenizer
from engine.events import TokenEvent
from engine.output_processor import OutputProcessor
from engine.request import GenerateRequest, OutputDelta
from engine.sampling_params import derive_seed
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Choice:
    request: GenerateRequest  # as the engine gets it: n = 1, with a seed and an id of its own
    processor: OutputProcessor

    @property
    def is_finished(self) -> bool:
        return self.processor.finished

    def feed(self, event: TokenEvent) -> OutputDelta | None:
        """Raises the event's error. A choice that finishes without the event saying so must be aborted."""
        if event.error is not None:
            raise event.error
        delta = self.processor.feed(
            () if event.token_id is None else (event.token_id,),
            None if event.logprob is None else (event.logprob,),
            finish_reason=event.finish_reason,
            stop_reason=event.stop_token_id,
            num_cached_tokens=event.num_cached_tokens,
        )
        if delta is None or event.milestones is None:
            return delta
        return replace(delta, milestones=event.milestones)


def split_choices(request: GenerateRequest, tokenizer: Tokenizer) -> list[Choice]:
    params = request.params
    seed = params.seed if params.seed is not None else secrets.randbits(62)
    return [
        Choice(
            replace(
                request,
                request_id=f"{request.request_id}#{index}",
                params=replace(params, n=1, seed=derive_seed(seed, index)),
            ),
            OutputProcessor(index, params, IncrementalDetokenizer(tokenizer), len(request.prompt_token_ids)),
        )
        for index in range(params.n)
    ]
