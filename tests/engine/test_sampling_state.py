"""What a choice remembers of its tokens."""

from __future__ import annotations

import random
from collections import Counter

from engine.sampling_params import SamplingParams
from engine.sampling_state import SamplingState


def counts(state: SamplingState) -> dict[int, int]:
    return dict(zip(state.seen_token_ids, state.output_counts, strict=True))


def test_counts_grow_with_the_output() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(30) for _ in range(20)]
    state = SamplingState(SamplingParams(presence_penalty=1.0), 0, prompt)
    output: list[int] = []
    for _ in range(100):
        token_id = rng.randrange(60)
        output.append(token_id)
        state.append(token_id)
        assert counts(state) == dict.fromkeys(prompt, 0) | Counter(output)
    assert state.num_outputs == 100


def test_a_preempted_choice_is_restored_from_its_output() -> None:
    params = SamplingParams(repetition_penalty=1.5)
    grown = SamplingState(params, 0, [1, 2])
    for token_id in (2, 3, 3):
        grown.append(token_id)
    restored = SamplingState(params, 0, [1, 2], [2, 3, 3])
    assert (
        (restored.num_outputs, counts(restored))
        == (grown.num_outputs, counts(grown))
        == (3, {1: 0, 2: 1, 3: 2})
    )


def test_without_penalties_nothing_is_counted() -> None:
    state = SamplingState(SamplingParams(), 0, range(1000))
    state.append(5)
    assert (state.num_outputs, counts(state)) == (1, {})
