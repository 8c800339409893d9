"""Decode on a group of GPUs against one GPU, with and without adapters.

    python -m load_tests.tensor_parallel_bench --world 2 [--model 70b] [--out load_tests/results]

Model: Llama-3-8B shape, bf16, random weights, all-linear adapters, each rank with its part. Every rank runs
the same engine over the same requests, so plans need not be sent (that takes rank 0 about 0.1 ms a step
beside its GPU). One GPU first, then the group, on one machine. Llama-3-70B shape: the group only.

  tpot      time per output token: 64 prompt tokens, (time of 144 - time of 16 output tokens) / 128
  sum       of one row-parallel linear over the ranks, with residual add and RMSNorm, from a graph of 64:
            kernels.all_reduce, and NCCL with a launch for the rest
  sums      launches of either kind in a decode step of batch 64, from a trace
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.spec import local_spec
from engine.runner.cuda import CudaRunner
from engine.sharding import Shard, shard_shape
from engine.tensor_parallel.comm import ALONE, Comm, Ranks, join
from kernels.all_reduce.bench import measure as measure_sum
from load_tests.engine_bench import CASES, MAX_MODEL_LEN, NUM_ADAPTERS, Bench, Case
from load_tests.random_engine import PAGE_TOKENS, SPEC, SPEC_70B, random_weights

BATCHES = (1, 8, 64, 256)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    spec: Any
    num_pages: int
    cases: Sequence[Case]
    batches: Sequence[int]
    fits_one: bool


MODELS = {
    "8b": Model(SPEC, 24_000, CASES, BATCHES, fits_one=True),
    "70b": Model(SPEC_70B, 9_000, (CASES[0], CASES[3]), (64,), fits_one=False),
}


def run_rank(model: Model, rank: int, world: int, rendezvous: str) -> list[Row]:
    rows: list[Row] = []
    comm: Comm = ALONE
    if world > 1:
        join(rank, world, rendezvous, "cuda")
        for batch in BATCHES:
            fused, nccl = measure_sum(batch)
            rows.append(_row("sum over ranks", f"{batch} rows", fused, "us"))
            rows.append(_row("sum over ranks by NCCL", f"{batch} rows", nccl, "us"))
        vocab = [len(shard_shape(model.spec.shape, Shard(r, world)).vocab) for r in range(world)]
        comm = Ranks(vocab)
    shard = Shard(rank, world)
    shape = shard_shape(model.spec.shape, shard).local
    config = EngineConfig(
        model="random", device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, max_rank=64,
        max_adapters=NUM_ADAPTERS, host_cache_bytes=64 << 30, prefix_cache=False, fairness="arrival",
    )  # fmt: skip
    weights = random_weights(shard, model.spec.shape)
    runner = CudaRunner(
        local_spec(model.spec, shard), weights, config, model.num_pages, PAGE_TOKENS, MAX_MODEL_LEN, comm
    )
    runner.warm_up()
    # every rank must start copies in the same steps: estimates of time must not decide
    runner.copy_bytes_per_s = float("inf")
    for case in model.cases:
        bench = Bench(runner, config, case, shape, model.num_pages)
        bench.run(64, 64, 8)  # adapters into the pool
        for batch in model.batches:
            ms = (bench.run(batch, 64, 144) - bench.run(batch, 64, 16)) / 128 * 1e3
            rows.append(_row(case.name, f"tpot, batch {batch}", ms, "ms"))
        rows.append(_row(case.name, "sums a step", _sums_a_step(bench), ""))
    return rows


def _sums_a_step(bench: Bench) -> float:
    num_steps = 10
    profile = bench.profile_decode(64, num_steps)
    launches: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            launches[event.name()] += 1
            microseconds[event.name()] += event.duration_ns() / 1000
    for name, us in microseconds.most_common(14):
        print(f"  {us / num_steps:8.1f} us {launches[name] / num_steps:6.1f} x {name[:90]}", file=sys.stderr)
    sums = sum(count for name, count in launches.items() if "all_reduce" in name or "AllReduce" in name)
    return sums / num_steps


def _row(case: str, metric: str, value: float, unit: str) -> Row:
    return {"case": case, "metric": metric, "value": value, "unit": unit}


def run_group(name: str, world: int) -> list[Row]:
    """Each rank in a process of its own; rank 0's rows."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "load_tests.tensor_parallel_bench", "--model", name]
        ranks = [
            subprocess.Popen(
                [*command, "--world", str(world), "--rank", str(rank), "--directory", directory],
                stderr=None if rank == 0 else subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            for rank in range(world)
        ]
        try:
            if ranks[0].wait() != 0:
                raise SystemExit("rank 0 has failed")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        result: list[Row] = json.loads(rows.read_text())
        return result


def report(name: str, rows: list[Row], alone: list[Row], world: int, out: Path | None) -> None:
    one_gpu = {(row["case"], row["metric"]): row["value"] for row in alone}
    conditions = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    command = f"python -m load_tests.tensor_parallel_bench --world {world} --model {name}"
    lines = [
        f"# Llama-3-{name.upper()} shape, tensor parallel on {world} H200",
        "",
        f"{conditions}. Written by",
        f"`{command}`, which says what is measured.",
        "",
        f"| case | metric | unit | {world} GPUs | one GPU | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        row["one_gpu"] = one = one_gpu.get((row["case"], row["metric"]))
        cells = [row["case"], row["metric"], row["unit"], f"{row['value']:.2f}", "", ""]
        if one is not None and row["unit"]:
            cells[4:] = [f"{one:.2f}", f"{one / row['value']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines), flush=True)
    if out is not None:
        stem = f"h200_tp{world}" + ("" if name == "8b" else f"_{name}")
        result = {"command": command, "conditions": conditions, "rows": rows}
        (out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
        (out / f"{stem}.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    model = MODELS[args.model]
    if args.rank is not None:
        rows = run_rank(model, args.rank, args.world, str(args.directory / "rendezvous"))
        if args.rank == 0:
            (args.directory / "rows.json").write_text(json.dumps(rows))
        return 0
    alone = run_group(args.model, 1) if model.fits_one else []
    report(args.model, run_group(args.model, args.world), alone, args.world, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
