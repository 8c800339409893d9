from __future__ import annotations

import random
import time
from array import array

import numpy as np
import pytest
import torch

from engine.plan import PENDING, ScheduledChunk
from engine.runner.batch import build_batch
from engine.runner.step_inputs import StepInputs

PAGE_TOKENS = 4


def inputs() -> StepInputs:
    return StepInputs(64, 16, 20, 8, PAGE_TOKENS, {"seeds": np.int64}, torch.device("cpu"))


def no_slot(request_id: str) -> int:
    raise AssertionError(f"{request_id} has no token on the device")


def random_chunks(seed: int) -> list[ScheduledChunk]:
    rng = random.Random(seed)
    pages = rng.sample(range(1000), 300)
    chunks = []
    for i in range(rng.randint(1, 9)):
        start, length = rng.randrange(20), rng.choice([1, 1, 1, 2, 5])
        page_ids = array("i", (pages.pop() for _ in range(-(-(start + length) // PAGE_TOKENS))))
        token_ids = tuple(rng.randrange(100) for _ in range(length))
        chunks.append(
            ScheduledChunk(str(i), start, token_ids, page_ids, rng.randrange(-1, 3), rng.random() < 0.7)
        )
    return chunks


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_cpu_backends_batch(seed: int) -> None:
    chunks = random_chunks(seed)
    step = inputs()
    for stale in step.host.values():
        stale[...] = 77
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    batch = step.write(chunks, num_tokens, len(chunks), no_slot)
    expected = build_batch(chunks, "cpu", PAGE_TOKENS)
    for name in ("token_ids", "positions", "kv_slots", "context_lens", "cu_query_lens"):
        want = getattr(expected, name).numpy()
        assert step.host[name][: len(want)].tolist() == want.tolist(), name
    assert batch.segments == expected.segments
    assert batch.sampled == tuple(chunks[i].request_id for i in expected.order)
    assert step.host["rows"][: len(batch.sampled)].tolist() == expected.logits_indices.tolist()
    for row, context in enumerate(expected.context_lens.tolist()):
        pages = -(-context // PAGE_TOKENS)
        assert step.host["page_table"][row, :pages].tolist() == expected.page_table[row, :pages].tolist()
    assert batch.has_adapters == any(chunk.adapter_slot >= 0 for chunk in chunks)


def test_padding_writes_nothing_and_has_no_adapter() -> None:
    """FR-39."""
    step = inputs()
    for stale in step.host.values():
        stale[...] = 5
    chunk = ScheduledChunk("r", 6, (9,), array("i", (3, 4)), 2, samples=True)
    step.write([chunk], 8, 8, no_slot)
    assert step.host["kv_slots"][:8].tolist() == [4 * PAGE_TOKENS + 2] + [-1] * 7
    assert step.host["slots"][:8].tolist() == [2] + [-1] * 7
    assert step.host["context_lens"][:8].tolist() == [7] + [0] * 7
    assert step.host["cu_query_lens"][:9].tolist() == list(range(9))
    assert step.write([], 8, 8, no_slot).segments == ()


def test_padding_of_a_step_with_a_prefill_chunk_ends_with_sequences_without_a_query() -> None:
    step = inputs()
    chunks = [
        ScheduledChunk("p", 0, (9, 8, 7), array("i", (3,)), -1, samples=True),
        ScheduledChunk("d", 6, (9,), array("i", (4, 5)), -1, samples=True),
    ]
    step.write(chunks, 6, 5, no_slot)
    assert step.host["cu_query_lens"][:6].tolist() == [0, 3, 4, 5, 6, 6]
    assert step.host["context_lens"][:5].tolist() == [3, 7, 0, 0, 0]


def test_the_copy_carries_every_field() -> None:
    step = inputs()
    for i, field in enumerate(step.host.values()):
        field[...] = i + 1
    step.copy(16)
    for i, copied in enumerate(step.device.values()):
        assert (copied == i + 1).all()


def test_the_copy_leaves_out_page_table_rows_that_are_not_in_use() -> None:
    step = inputs()
    step.host["page_table"][...] = 7
    step.copy(3)
    assert (step.device["page_table"][:3] == 7).all()
    assert (step.device["page_table"][3:] == 0).all()


def test_a_pending_token_names_its_requests_slot() -> None:
    step = inputs()
    decode = ScheduledChunk("9", 6, (PENDING,), array("i", (3, 4)), 2, samples=True)
    # of a request preempted with its last token in flight
    prefill = ScheduledChunk("4", 0, (5, 6, PENDING), array("i", (7,)), -1, samples=True)
    step.write([decode, prefill], 4, 2, int)
    assert step.host["token_ids"][:4].tolist() == [5, 6, -5, -10]


def test_a_large_decode_batch_is_written_quickly() -> None:
    step = StepInputs(256, 256, 128, 8, 16, {}, torch.device("cpu"))
    pages = array("i", range(40))
    chunks = [ScheduledChunk(str(i), 639, (PENDING,), pages, i % 64, True) for i in range(256)]
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        step.write(chunks, 256, 256, int)
        seconds.append(time.perf_counter() - started)
    assert np.median(seconds) < 0.02
