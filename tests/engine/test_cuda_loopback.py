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


def greedy_tokens(sends: bool) -> dict[str, list[int]]:
    """Of requests that end one after the other, so that batches of all sizes come."""
    torch.manual_seed(1)
    rank = Rank.looped_back(MODEL, sends)
    config = rank.config(max_num_seqs=BATCH, max_rank=max(MIXED_RANKS))
    runner = rank.runner(config, NUM_PAGES)
    part = shard_adapters(MODEL.spec.shape, SHARD, False)
    engine = RandomEngine(
        runner, config, NUM_PAGES, MAX_MODEL_LEN, ADAPTERS, part.sharded.local, rows_of=part.num_rows
    )
    torch.manual_seed(1)
    engine.read(ADAPTERS)
    names = [None, *ADAPTERS]
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
