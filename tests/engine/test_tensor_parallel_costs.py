from __future__ import annotations

import pytest

from engine.shape import ModelShape
from engine.sharding import Shard
from engine.tensor_parallel.costs import LOCAL_CPUS, NCCL, NVLINK, Batch, GroupCost, Sharding, choose_sharding
from tests.engine.test_sharding import LLAMA_8B, LLAMA_70B

AMPLE = 1 << 50
GIB = 1 << 30


def choice(model: ModelShape, num_ranks: int, rank: int, pool_bytes: int = AMPLE, rows: int = 64) -> Sharding:
    return choose_sharding(model, num_ranks, Batch(rows, rank, 1024), NVLINK, 2, pool_bytes)


def test_small_ranks_are_replicated_and_large_ones_cut() -> None:
    choices = [choice(LLAMA_70B, 4, rank) for rank in (1, 8, 16, 64, 256)]
    assert choices == sorted(choices, reverse=True), "it changes once"
    assert (choices[0], choices[-1]) == ("replicate", "full")


@pytest.mark.parametrize("rank", [16, 64, 256])
def test_the_choice_is_what_was_faster(rank: int) -> None:
    """load_tests/results/h200_tp2_loopback_shardings.md; with NCCL's exchange, h200_tp2_shardings.md."""
    assert choice(LLAMA_8B, 2, rank) == "full"
    assert choose_sharding(LLAMA_8B, 2, Batch(64, rank, 1024), NCCL, 2, AMPLE) == "replicate"


def test_what_counts_is_the_batchs_sum_of_ranks() -> None:
    assert choice(LLAMA_70B, 4, 256, rows=1) == "replicate"
    assert choice(LLAMA_70B, 4, 256, rows=64) == "full"


def test_memory_decides_where_only_one_fits() -> None:
    batch = Batch(64, 4, 1024)
    whole, cut = (GroupCost.of(LLAMA_8B, 4, s, 2).pool_bytes(batch) for s in ("replicate", "full"))
    assert cut < whole
    assert choice(LLAMA_8B, 4, 4, whole) == "replicate"
    assert choice(LLAMA_8B, 4, 4, whole - 1) == "full"
    assert choice(LLAMA_8B, 4, 4, cut) == "full"
    assert choice(LLAMA_8B, 4, 4, cut - 1) == "replicate", "neither fits: the faster one"


def test_adapter_bytes_are_those_of_the_formula() -> None:
    """Replicated 67, 51, 43 % on 2, 4, 8 ranks; cut 1/N."""
    alone = GroupCost.of(LLAMA_8B, 1, "replicate", 2).adapter_bytes(16)
    assert alone == 80 << 20
    for num_ranks, percent in ((2, 67), (4, 51), (8, 43)):
        replicated = GroupCost.of(LLAMA_8B, num_ranks, "replicate", 2).adapter_bytes(16)
        assert replicated / alone == pytest.approx(percent / 100, abs=0.01)
        assert GroupCost.of(LLAMA_8B, num_ranks, "full", 2).adapter_bytes(16) * num_ranks == alone


def test_one_rank_takes_no_collective() -> None:
    batch = Batch(64, 16, 1024)
    group = GroupCost.of(LLAMA_8B, 1, "replicate", 2)
    bytes_read = group.base_bytes + group.pool_bytes(batch)
    assert group.step_s(batch, NVLINK) == bytes_read / NVLINK.read_bytes_per_s
    assert group.part.sharded.shard == Shard()


def test_slower_links_cost_more() -> None:
    batch = Batch(64, 64, 1024)
    for sharding in ("replicate", "full"):
        group = GroupCost.of(LLAMA_8B, 4, sharding, 2)
        times = [group.step_s(batch, machine) for machine in (NVLINK, NCCL, LOCAL_CPUS)]
        assert times == sorted(times)
