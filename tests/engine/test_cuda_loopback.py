"""On one GPU, what ranks that share memory launch gives the tokens of launches that wait for nobody."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from engine.sharding import shard_adapters
from load_tests.engine_bench import MIXED_RANKS
from load_tests.loopback import SHARD
from load_tests.random_engine import SHAPE, SPEC, RandomEngine
from load_tests.tensor_parallel_rank import Model, Rank

pytestmark = pytest.mark.gpu

NUM_PAGES, MAX_MODEL_LEN, BATCH = 2000, 256, 64
# layers enough that a page holds the largest tile of an adapter
MODEL = Model(replace(SPEC, shape=replace(SHAPE, num_layers=8)), NUM_PAGES, (), (), True, ())
ADAPTERS = {f"adapter {i}": MIXED_RANKS[i % len(MIXED_RANKS)] for i in range(BATCH // 2)}


def greedy_tokens(sends: bool, is_full: bool = False, has_adapters: bool = True) -> dict[str, list[int]]:
    """Of requests that end one after the other, so that batches of all sizes come."""
    torch.manual_seed(1)
    rank = Rank.looped_back(MODEL, sends)
    config = rank.config(max_num_seqs=BATCH, max_rank=max(MIXED_RANKS))
    runner = rank.runner(config, NUM_PAGES, rank.split if is_full else None)
    assert (runner._handover is not None) == (is_full and sends)
    part = shard_adapters(MODEL.spec.shape, SHARD, is_full)
    engine = RandomEngine(
        runner, config, NUM_PAGES, MAX_MODEL_LEN, ADAPTERS, part.sharded.local, rows_of=part.num_rows
    )
    torch.manual_seed(1)
    engine.read(ADAPTERS)
    names = [None, *ADAPTERS] if has_adapters else [None]
    for i in range(BATCH):
        adapter = names[i * i % len(names)]
        engine.core.add_request(engine.request(str(i), [7 * i + 3 * j for j in range(20)], 8 + i, adapter))
    tokens = defaultdict(list)
    while not engine.core.is_idle:
        for event in engine.turn():
            if event.token_id is not None:
                tokens[event.request_id].append(event.token_id)
    runner.close()
    return tokens


def test_what_is_sent_is_what_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of products and of adapters, ahead of the sums, which wait for them on another stream."""
    # without launches ahead prefill has no graphs, and eager steps round elsewhere
    monkeypatch.setattr("engine.runner.buckets.PREFILL_BUCKETS", ())
    tokens = greedy_tokens(sends=True)
    assert {len(own) for own in tokens.values()} == {8 + i for i in range(BATCH)}
    assert len({tuple(own[:8]) for own in tokens.values()}) > BATCH // 2
    assert tokens == greedy_tokens(sends=False)


def test_fully_sharded_adapters_hand_over_what_collectives_exchange() -> None:
    """But for the order of sums, which now and then rounds another way."""
    handed, exchanged, plain = (
        greedy_tokens(sends=True, is_full=True),
        greedy_tokens(sends=False, is_full=True),
        greedy_tokens(sends=True, is_full=True, has_adapters=False),
    )
    same, same_as_plain = (
        sum(a == b for i in handed for a, b in zip(handed[i][:8], other[i][:8], strict=True)) / (8 * BATCH)
        for other in (exchanged, plain)
    )
    assert same > 0.97, same
    assert same_as_plain < 0.5, same_as_plain
