"""The lists that the GPU kernels walk, against a walk over single tokens."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kernels.sgmv import RANK_BLOCK, Segment
from kernels.sgmv.lists import COUNT_SHIFT, FIELDS, HEADER, lists_size, write_lists
from kernels.sgmv.plan import SgmvPlan, decode_plan, prefill_plan

MAX_RANK = 100
POISON = -7777


def entries(plan: SgmvPlan, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Items and blocks, up to their counts."""
    items = lists[HEADER:].reshape(-1, FIELDS)
    blocks = items[plan.max_items + 1 :]
    assert not items[lists[0] : plan.max_items + 1].any()
    assert not blocks[lists[1] :].any()
    return items[: lists[0]], blocks[: lists[1]]


def covered(list_entries: np.ndarray) -> list[tuple[int, int, int]]:
    """(token, slot, rank block) of all entries."""
    triples = []
    for row, rows, slot, rank_blocks in list_entries.tolist():
        first, count = rank_blocks & ((1 << COUNT_SHIFT) - 1), rank_blocks >> COUNT_SHIFT
        triples += [(t, slot, b) for t in range(row, row + rows) for b in range(first, first + count)]
    return sorted(triples)


def random_segments(rng: random.Random, max_tokens: int, max_segments: int, num_slots: int) -> list[Segment]:
    start, segments = 0, []
    for slot in sorted(rng.sample(range(-1, num_slots), rng.randint(0, min(max_segments, num_slots)))):
        length = rng.choice([1, 1, 2, 7, 8, 9, 16, 17, 64, 65, 200])
        if start + length <= max_tokens:
            segments.append(Segment(slot, start, start + length))
            start += length
    return segments


@pytest.mark.parametrize("plan", [decode_plan(64, MAX_RANK), prefill_plan(1000, 64, MAX_RANK)])
def test_every_adapted_token_and_rank_block_is_walked_once(plan: SgmvPlan) -> None:
    rng = random.Random(0)
    for _ in range(200):
        ranks = np.array([rng.choice([0, 1, 8, 16, 17, 64, MAX_RANK]) for _ in range(80)])
        segments = random_segments(rng, plan.max_tokens, plan.max_segments, len(ranks))
        lists = np.full(lists_size(plan), POISON, np.int32)
        counts = write_lists(plan, segments, ranks, lists)
        items, blocks = entries(plan, lists)
        num_plain = sum(end - start for slot, start, end in segments if slot < 0)
        assert (len(items), len(blocks), num_plain) == counts
        want = sorted(
            (token, slot, block)
            for slot, start, end in segments
            if slot >= 0
            for token in range(start, end)
            for block in range(max(1, -(-ranks[slot] // RANK_BLOCK)))
        )
        assert covered(items) == covered(blocks) == want
        assert (items[:, 1] <= plan.shrink.rows).all()
        assert (blocks[:, 1] <= plan.expand.rows).all()
        assert (items[:, 3] >> COUNT_SHIFT <= plan.shrink.rank_blocks).all()


@pytest.mark.parametrize("num_segments", [1, 2, 9, 64])
@pytest.mark.parametrize("plan", [decode_plan(64, MAX_RANK), prefill_plan(300, 64, MAX_RANK)])
def test_any_mix_of_the_largest_adapters_fits(plan: SgmvPlan, num_segments: int) -> None:
    """One token each but for the last segment, which takes the rest."""
    starts = [*range(num_segments), plan.max_tokens]
    segments = [Segment(i, start, end) for i, (start, end) in enumerate(itertools.pairwise(starts))]
    lists = np.zeros(lists_size(plan), np.int32)
    write_lists(plan, segments, np.full(num_segments, MAX_RANK), lists)
    items, blocks = entries(plan, lists)
    assert covered(items) == covered(blocks)
    assert len(covered(items)) == plan.max_tokens * plan.rank_blocks


def test_a_batch_without_adapters_is_empty() -> None:
    plan = decode_plan(8, MAX_RANK)
    lists = np.full(lists_size(plan), POISON, np.int32)
    assert write_lists(plan, [Segment(-1, 0, 8)], np.array([16]), lists) == (0, 0, 8)
    assert write_lists(plan, [], np.array([16]), lists) == (0, 0, 0)


def test_more_than_the_plan_allows_is_our_mistake() -> None:
    plan = decode_plan(2, 16)
    with pytest.raises(AssertionError):
        write_lists(plan, [Segment(0, 0, 400)], np.array([16]), np.zeros(lists_size(plan), np.int32))


def test_prefill_wants_tokens_without_adapter_first() -> None:
    plan = prefill_plan(8, 4, 16)
    lists = np.zeros(lists_size(plan), np.int32)
    with pytest.raises(AssertionError):
        write_lists(plan, [Segment(0, 0, 3), Segment(-1, 3, 8)], np.array([16]), lists)


def test_a_rank_above_the_plans_is_our_mistake() -> None:
    plan = decode_plan(2, 16)
    with pytest.raises(AssertionError):
        write_lists(plan, [Segment(0, 0, 1)], np.array([17]), np.zeros(lists_size(plan), np.int32))
