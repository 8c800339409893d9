from __future__ import annotations

import pytest

from engine.runner.buckets import Buckets

LIMITS = [(256, 8192), (32, 512), (8, 64), (1, 1), (300, 8192), (100, 100), (33, 300)]


@pytest.mark.parametrize(("max_seqs", "max_tokens"), LIMITS)
def test_decodes_of_all_sequences_have_a_bucket_and_none_is_larger_than_a_step(
    max_seqs: int, max_tokens: int
) -> None:
    buckets = Buckets.plan(max_seqs, max_tokens)
    assert list(buckets.all) == sorted(set(buckets.all))
    assert max_seqs <= buckets.most_decodes <= max_tokens
    assert buckets.most_tokens <= max_tokens


@pytest.mark.parametrize(("max_seqs", "max_tokens"), LIMITS)
def test_a_step_takes_the_smallest_bucket_that_holds_it(max_seqs: int, max_tokens: int) -> None:
    buckets = Buckets.plan(max_seqs, max_tokens)
    for num_tokens in range(1, buckets.most_tokens + 1):
        bucket = buckets.holding(num_tokens)
        assert bucket >= num_tokens
        assert all(other < num_tokens or other >= bucket for other in buckets.all)


def test_decodes_keep_their_buckets_where_steps_with_prefill_are_limited() -> None:
    buckets = Buckets.plan(256, 8192)
    assert buckets.limit_prefill(500).prefill == (320, 384, 448)
    assert buckets.limit_prefill(0) == Buckets(buckets.decode, ())
