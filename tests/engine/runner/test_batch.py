"""Batch tensors equal what one reads off the scheduled sequences, token by token."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from engine.plan import ScheduledChunk
from engine.runner.batch import build_batch
from kernels.sgmv import Segment

PAGE_TOKENS = 4


def chunk(
    token_ids: list[int], page_ids: list[int], start: int = 0, slot: int = -1, samples: bool = True
) -> ScheduledChunk:
    return ScheduledChunk("", start, tuple(token_ids), array("i", page_ids), slot, samples)


def random_seqs(seed: int) -> list[ScheduledChunk]:
    rng = random.Random(seed)
    pages = rng.sample(range(1000), 400)
    seqs = []
    for _ in range(rng.randint(1, 9)):
        start, length = rng.randrange(20), rng.choice([1, 1, 1, 2, 5, 17])
        num_pages = -(-(start + length) // PAGE_TOKENS) + rng.randrange(2)
        seqs.append(
            chunk(
                [rng.randrange(100) for _ in range(length)],
                [pages.pop() for _ in range(num_pages)],
                start=start,
                slot=rng.randrange(-1, 3),
                samples=rng.random() < 0.7,
            )
        )
    return seqs


@pytest.mark.parametrize("seed", range(30))
def test_equals_a_walk_over_the_tokens(seed: int) -> None:
    seqs = random_seqs(seed)
    batch = build_batch(seqs, "cpu", PAGE_TOKENS)
    rows = sorted(range(len(seqs)), key=lambda i: seqs[i].adapter_slot)
    t, bounds, order, logits_indices, slots = 0, [0], [], [], []
    for s, i in enumerate(rows):
        seq = seqs[i]
        for j, token_id in enumerate(seq.token_ids):
            position = seq.start + j
            page = seq.page_ids[position // PAGE_TOKENS]
            assert batch.token_ids[t] == token_id
            assert batch.positions[t] == position
            assert batch.kv_slots[t] == page * PAGE_TOKENS + position % PAGE_TOKENS
            slots.append(seq.adapter_slot)
            t += 1
        assert batch.page_table[s, : len(seq.page_ids)].tolist() == list(seq.page_ids)
        assert not batch.page_table[s, len(seq.page_ids) :].any()
        assert batch.context_lens[s] == seq.start + len(seq.token_ids)
        assert batch.query_lens[s] == len(seq.token_ids)
        bounds.append(t)
        if seq.samples:
            order.append(i)
            logits_indices.append(t - 1)
    assert batch.cu_query_lens.tolist() == bounds
    assert batch.logits_indices.tolist() == logits_indices
    assert batch.order == tuple(order)
    assert [s.slot for s in batch.segments for _ in range(s.start, s.end)] == slots
    assert len({s.slot for s in batch.segments}) == len(batch.segments)


def test_tokens_without_adapter_come_first_and_adapters_are_contiguous() -> None:
    seqs = [chunk([i], [i], slot=slot) for i, slot in enumerate([2, -1, 0, 2, -1])]
    batch = build_batch(seqs, "cpu", PAGE_TOKENS)
    assert batch.token_ids.tolist() == [1, 4, 2, 0, 3]
    assert batch.segments == (Segment(-1, 0, 2), Segment(0, 2, 3), Segment(2, 3, 5))
    assert batch.order == (1, 4, 2, 0, 3)


def test_all_tensors_are_int64() -> None:
    batch = build_batch([chunk([3], [5])], "cpu", PAGE_TOKENS)
    for name in ("token_ids", "positions", "kv_slots", "page_table", "context_lens", "cu_query_lens"):
        assert getattr(batch, name).dtype == torch.int64


def test_a_step_that_only_fills_the_cache_has_no_logits() -> None:
    batch = build_batch([chunk([3, 4], [5], samples=False)], "cpu", PAGE_TOKENS)
    assert batch.logits_indices.tolist() == []
    assert batch.order == ()
