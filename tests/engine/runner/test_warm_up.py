"""Steps that a runner takes before it is ready."""

from __future__ import annotations

import pytest

from engine.runner.warm_up import mixed_steps

LIMITS = [
    (512, 32, 8192),
    (8192, 256, 8192),
    (8192, 32, 128),
    (512, 1, 2048),
    (1, 1, 16),
    (2, 2, 16),
    (64, 8, 8),
]


@pytest.mark.parametrize(("budget", "num_seqs", "max_model_len"), LIMITS)
def test_no_step_is_larger_than_steps_may_be(budget: int, num_seqs: int, max_model_len: int) -> None:
    for plan, _ in mixed_steps(budget, num_seqs, max_model_len, page_tokens=16):
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        assert 1 <= len(lengths) <= num_seqs
        assert sum(lengths) <= budget
        assert all(1 <= length <= max_model_len for length in lengths)


@pytest.mark.parametrize(("budget", "num_seqs", "max_model_len"), LIMITS)
def test_the_largest_step_comes_first_without_and_with_an_adapter(
    budget: int, num_seqs: int, max_model_len: int
) -> None:
    plans = [plan for plan, _ in mixed_steps(budget, num_seqs, max_model_len, page_tokens=16)]
    sizes = [sum(len(chunk.token_ids) for chunk in plan.chunks) for plan in plans]
    most = min(budget, num_seqs * max_model_len)
    assert sizes[0] == most
    assert any(
        size == most and plan.chunks[0].adapter_slot == 0 for size, plan in zip(sizes, plans, strict=True)
    )


def test_all_sequences_are_sampled_at_once_with_every_edit() -> None:
    assert any(
        len(plan.chunks) == 32 and params.penalizes and params.logit_bias and params.logprobs is not None
        for plan, params in mixed_steps(512, 32, 8192, page_tokens=16)
    )
