"""Decode on a group of GPUs against one GPU, with and without adapters.

    python -m load_tests.tensor_parallel_bench --world 2 [--out load_tests/results]
        [--model 70b] [--only cases | shardings] [--sharding replicate]
    python -m load_tests.tensor_parallel_bench --loopback [--out load_tests/results] ...

Model: Llama-3-8B shape, bf16, random weights, all-linear adapters, each rank with its part. Every rank runs
the same engine over the same requests, so plans need not be sent (that takes rank 0 about 0.1 ms a step
beside its GPU). One GPU first, then the group, on one machine. Llama-3-70B shape: the group only.

  tpot      time per output token: 64 prompt tokens, (time of 144 - of 16 output tokens) / 128; median of 3
  sum       of one row-parallel linear over the ranks, with residual add and RMSNorm, from a graph of 64:
            kernels.all_reduce, and NCCL with a launch for the rest
  sums      launches of either kind in a decode step of batch 64, from a trace
  replicate, full: tpot with 64 distinct adapters of one rank by lora_sharding, and LoRA's share of it, which
            is what it is above the tpot without adapters; throughput of 256 requests, 64 at a time, of 512
            prompt and 128 output tokens
  exchange by NCCL  of what lies between A and B, fully sharded, 64 rows, from a graph of 64: what larger
            steps take, and groups that share no memory

--sharding: of the cases' adapters, as lora_sharding; by itself the one that "auto" takes where GPUs share
memory.

--loopback: on one GPU, in the place of a group of two (load_tests.loopback).

Rows appear on stderr as they are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from engine.sharding import Shard
from engine.tensor_parallel.costs import NVLINK, Batch, Sharding, choose_sharding
from kernels.all_reduce.bench import measure as measure_sum
from load_tests.conditions import gpu_conditions
from load_tests.engine_bench import CASES, MAX_MODEL_LEN, NUM_ADAPTERS, Bench
from load_tests.loopback import SHARD
from load_tests.random_engine import SPEC, SPEC_70B
from load_tests.tensor_parallel_rank import Model, Rank, Row, Rows, tpot_ms
from load_tests.tensor_parallel_shardings import measure_shardings

BATCHES = (1, 8, 64, 256)
PARTS = ("cases", "shardings")
LOOPED_BACK = ", by one that sends itself what they would send each other"

MODELS = {
    "8b": Model(SPEC, 24_000, CASES, BATCHES, True, (((16, 64), 24_000), ((256,), 60_000))),
    "70b": Model(SPEC_70B, 9_000, (CASES[0], CASES[3]), (64,), False, ()),
}


def run_rank(rank: Rank, parts: Sequence[str], sharding: Sharding) -> Rows:
    rows = Rows()
    if "cases" in parts:
        if dist.is_initialized():
            measure_sums(rows)
        measure_cases(rank, rows, sharding)
    if rank.shard.world > 1 and "shardings" in parts:
        measure_shardings(rank, rows)
    return rows


def measure_sums(rows: Rows) -> None:
    for batch in BATCHES:
        fused, nccl = measure_sum(batch)
        rows.add("sum over ranks", f"{batch} rows", fused, "us")
        rows.add("sum over ranks by NCCL", f"{batch} rows", nccl, "us")


def measure_cases(rank: Rank, rows: Rows, sharding: Sharding) -> None:
    is_full = rank.shard.world > 1 and sharding == "full"
    config = rank.config(max_num_seqs=256, max_rank=64)
    runner = rank.runner(config, rank.model.num_pages, rank.split if is_full else None)
    for case in rank.model.cases:
        bench = rank.bench(runner, config, case, rank.model.num_pages, is_full)
        for batch in rank.model.batches:
            rows.add(case.name, f"tpot, batch {batch}", tpot_ms(bench, batch), "ms")
        if rank.shard.world > 1:
            rows.add(case.name, "sums a step", _sums_a_step(bench), "")
    rank.wait_for_others()


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


def auto_sharding(model: Model, world: int) -> Sharding:
    """Where GPUs share memory, of which there is enough."""
    batch = Batch(rows=NUM_ADAPTERS, rank=16, context=MAX_MODEL_LEN)
    return choose_sharding(model.spec.shape, world, batch, NVLINK, 2, 1 << 50)


def run_group(
    name: str, world: int, parts: Sequence[str], sharding: Sharding, loopback: bool = False
) -> list[Row]:
    """Each rank in a process of its own, or looped back rank 0 alone; its rows."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "load_tests.tensor_parallel_bench"]
        command += ["--model", name, "--world", str(world), "--directory", directory, "--only", *parts]
        command += ["--sharding", sharding]
        command += ["--loopback"] if loopback else []
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                stderr=None if rank == 0 else subprocess.DEVNULL,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
            for rank in range(1 if loopback else world)
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


def report(
    name: str,
    rows: list[Row],
    alone: list[Row],
    world: int,
    loopback: bool,
    parts: Sequence[str],
    sharding: Sharding,
    out: Path | None,
) -> None:
    one_gpu = {(row["case"], row["metric"]): row["value"] for row in alone}
    conditions = ", ".join(gpu_conditions().values())
    how = "--loopback" if loopback else f"--world {world}"
    command = f"python -m load_tests.tensor_parallel_bench {how} --model {name}"
    if parts != PARTS:
        command += f" --only {' '.join(parts)}"
    if "cases" in parts:
        command += f" --sharding {sharding}"
    lines = [
        f"# Llama-3-{name.upper()} shape, tensor parallel on {world} H200{LOOPED_BACK if loopback else ''}",
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
        named = ([] if name == "8b" else [name], [] if parts == PARTS else parts)
        stem = "_".join([f"h200_tp{world}", *(["loopback"] if loopback else []), *itertools.chain(*named)])
        result = {"command": command, "conditions": conditions, "rows": rows}
        (out / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n")
        (out / f"{stem}.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--sharding", choices=get_args(Sharding))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    model, parts = MODELS[args.model], tuple(args.only)
    sharding: Sharding = args.sharding or auto_sharding(model, args.world)
    if args.loopback and args.world != SHARD.world:
        parser.error("--loopback stands for a group of two")
    if args.rank is not None:
        if args.loopback:
            rank = Rank.looped_back(model)
        else:
            rank = Rank.start(model, Shard(args.rank, args.world), str(args.directory / "rendezvous"))
        rows = run_rank(rank, parts, sharding)
        if args.rank == 0:
            (args.directory / "rows.json").write_text(json.dumps(rows))
        return 0
    alone = run_group(args.model, 1, parts, sharding) if model.fits_one and "cases" in parts else []
    group = run_group(args.model, args.world, parts, sharding, args.loopback)
    report(args.model, group, alone, args.world, args.loopback, parts, sharding, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
