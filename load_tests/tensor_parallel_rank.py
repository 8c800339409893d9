"""What one rank of a group measures with: its part of a random model, runners over it, rows of figures."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec, local_spec
from engine.runner.cuda import CudaRunner
from engine.sharding import Shard, shard_adapters, shard_shape
from engine.tensor_parallel.comm import ALONE, Comm, Ranks, join
from kernels.sgmv import Split
from load_tests.engine_bench import MAX_MODEL_LEN, NUM_ADAPTERS, Bench, Case
from load_tests.loopback import SHARD, Loopback
from load_tests.random_engine import PAGE_TOKENS, random_weights

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    spec: ModelSpec
    num_pages: int
    cases: Sequence[Case]
    batches: Sequence[int]
    fits_one: bool
    adapter_ranks: Sequence[tuple[Sequence[int], int]]  # to compare shardings with, and their pool's pages


class Rows(list[Row]):
    """Told on stderr as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def add(self, case: str, metric: str, value: float, unit: str) -> None:
        self.append({"case": case, "metric": metric, "value": value, "unit": unit})
        elapsed = time.monotonic() - self._began
        print(f"[{elapsed:6.1f} s] {case}, {metric}: {value:.2f} {unit}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of the group and the base model's part there; a runner is made for each part of the bench."""

    model: Model
    shard: Shard
    comm: Comm
    weights: LlamaWeights

    @property
    def is_looped_back(self) -> bool:
        return isinstance(self.comm, Loopback)

    @classmethod
    def start(cls, model: Model, shard: Shard, rendezvous: str) -> Rank:
        comm: Comm = ALONE
        if shard.world > 1:
            join(shard.rank, shard.world, rendezvous, "cuda")
            ranks = (Shard(rank, shard.world) for rank in range(shard.world))
            comm = Ranks([len(shard_shape(model.spec.shape, rank).vocab) for rank in ranks])
        return cls(model, shard, comm, random_weights(shard, model.spec.shape))

    @classmethod
    def looped_back(cls, model: Model, sends: bool = True) -> Rank:
        """One GPU as rank 0 of two."""
        columns = len(shard_shape(model.spec.shape, SHARD).vocab)
        return cls(model, SHARD, Loopback(columns, sends), random_weights(SHARD, model.spec.shape))

    def config(self, max_num_seqs: int, max_rank: int) -> EngineConfig:
        return EngineConfig(
            model="random", device="cuda", max_num_seqs=max_num_seqs, max_num_batched_tokens=8192,
            max_rank=max_rank, max_adapters=NUM_ADAPTERS, host_cache_bytes=64 << 30, prefix_cache=False,
            fairness="arrival", prefetch=False,
        )  # fmt: skip

    def runner(self, config: EngineConfig, num_pages: int, split: Split | None = None) -> CudaRunner:
        gc.collect()
        torch.cuda.empty_cache()  # what the runner before this one had
        runner = CudaRunner(
            local_spec(self.model.spec, self.shard),
            self.weights,
            config,
            num_pages,
            PAGE_TOKENS,
            MAX_MODEL_LEN,
            self.comm,
            split,
        )
        runner.warm_up()
        # every rank must start copies in the same steps: estimates of time must not decide
        runner.copy_bytes_per_s = float("inf")
        return runner

    def bench(
        self, runner: CudaRunner, config: EngineConfig, case: Case, num_pages: int, is_full: bool = False
    ) -> Bench:
        part = shard_adapters(self.model.spec.shape, self.shard, is_full)
        bench = Bench(runner, config, case, part.sharded.local, num_pages, part.num_rows)
        bench.run(64, 64, 8)  # adapters into the pool
        return bench

    @property
    def split(self) -> Split:
        """Of fully sharded adapters."""
        by_output = shard_shape(self.model.spec.shape, self.shard).by_output
        return Split(self.shard.rank, self.shard.world, by_output, self.comm)

    def wait_for_others(self) -> None:
        """Before a runner goes: they may still write into its memory."""
        torch.cuda.synchronize()
        self.comm.least(0)


def tpot_ms(bench: Bench, batch: int) -> float:
    """The median of three: what else a process does, as collecting a profile, may hold up one for 0.2 s."""
    return statistics.median(
        (bench.run(batch, 64, 144) - bench.run(batch, 64, 16)) / 128 * 1e3 for _ in range(3)
    )
