"""The two ways to shard adapters on a group of GPUs, side by side: rows of tensor_parallel_bench."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch

from engine.model.llama_cuda import fused_modules
from engine.sharding import shard_shape
from engine.tensor_parallel.costs import Sharding
from kernels.sgmv.plan import decode_plan
from kernels.sgmv.split import exchange
from kernels.sgmv.workspace import plane_shape
from kernels.timing import graph_us
from load_tests.engine_bench import CASES, NUM_ADAPTERS, Case
from load_tests.tensor_parallel_rank import Rank, Rows, tpot_ms

BATCH = NUM_ADAPTERS


def measure_shardings(rank: Rank, rows: Rows) -> None:
    if not rank.is_looped_back:
        _measure_exchange(rank, rows)
    for adapter_ranks, num_pages in rank.model.adapter_ranks:
        for sharding in get_args(Sharding):
            _measure_sharding(rank, rows, sharding, adapter_ranks, num_pages)


def _measure_sharding(
    rank: Rank, rows: Rows, sharding: Sharding, adapter_ranks: Sequence[int], num_pages: int
) -> None:
    """One runner for adapters of these ranks."""
    is_full = sharding == "full"
    config = rank.config(max_num_seqs=BATCH, max_rank=max(adapter_ranks))
    runner = rank.runner(config, num_pages, rank.split if is_full else None)
    base_ms = tpot_ms(rank.bench(runner, config, CASES[0], num_pages), BATCH)
    for adapter_rank in adapter_ranks:
        name = f"{sharding}, {NUM_ADAPTERS} adapters distinct, r{adapter_rank}"
        case = Case(name, (adapter_rank,) * NUM_ADAPTERS, "uniform")
        bench = rank.bench(runner, config, case, num_pages, is_full)
        ms = tpot_ms(bench, BATCH)
        rows.add(name, f"tpot, batch {BATCH}", ms, "ms")
        rows.add(name, "LoRA's share of it", ms - base_ms, "ms")
        seconds = bench.run(4 * BATCH, 512, 128)
        rows.add(name, "throughput", 4 * BATCH * 128 / seconds, "tok/s")
    rank.wait_for_others()


def _measure_exchange(rank: Rank, rows: Rows) -> None:
    shape, split = shard_shape(rank.model.spec.shape, rank.shard).local, rank.split
    modules = fused_modules(shape)[:2]
    for adapter_rank in sorted(r for ranks, _ in rank.model.adapter_ranks for r in ranks):
        plan = decode_plan(BATCH, adapter_rank)
        for name, module in zip(("q k v", "o"), modules, strict=True):
            planes = torch.zeros(plane_shape(plan, module, split), device="cuda")
            call = partial(exchange, planes, split, split.by_output[module.projection])
            rows.add(f"exchange by NCCL of {name}", f"r{adapter_rank}", graph_us([call] * 64), "us")
