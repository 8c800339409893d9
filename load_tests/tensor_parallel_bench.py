"""Decode on a group of GPUs against one GPU, with and without adapters.

    python -m load_tests.tensor_parallel_bench --world 2 [--out load_tests/results]

Model: Llama-3-8B shape, bf16, random weights, all-linear adapters, each rank with its part; NCCL inside CUDA
graphs. Every rank runs the same engine over the same requests, so plans need not be sent (that costs rank 0
about 0.1 ms a step beside the GPU). Time per output token: 64 prompt tokens,
(time of 144 - time of 16 output tokens) / 128. Figures of one GPU are those of h200_engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.model.spec import local_spec
from engine.runner.cuda import CudaRunner
from engine.sharding import Shard, shard_shape
from engine.tensor_parallel.comm import Ranks, join
from load_tests.engine_bench import CASES, MAX_MODEL_LEN, NUM_ADAPTERS, NUM_PAGES, Bench
from load_tests.random_engine import PAGE_TOKENS, SHAPE, SPEC, random_weights

BATCHES = (1, 8, 64, 256)
RESULTS = Path(__file__).parent / "results"


def all_reduce_us(num_rows: int) -> float:
    """Of one sum of hidden states, from a graph of 64."""
    x = torch.zeros(num_rows, SHAPE.hidden_size, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(64):
            dist.all_reduce(x)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e6 / 64)
    return min(times)


def run_rank(rank: int, world: int, rendezvous: str) -> list[dict[str, Any]]:
    join(rank, world, rendezvous, "cuda")
    shard = Shard(rank, world)
    sharded = shard_shape(SHAPE, shard)
    comm = Ranks([len(shard_shape(SHAPE, Shard(r, world)).vocab) for r in range(world)])
    config = EngineConfig(
        model="random", device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, max_rank=64,
        max_adapters=NUM_ADAPTERS, host_cache_bytes=64 << 30, prefix_cache=False, fairness="arrival",
    )  # fmt: skip
    rows = [_row("all-reduce", f"{n} tokens", all_reduce_us(n), "us") for n in BATCHES]
    weights = random_weights(shard)
    runner = CudaRunner(local_spec(SPEC, shard), weights, config, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN, comm)
    runner.warm_up()
    # every rank must start copies in the same steps: estimates of time must not decide
    runner.copy_bytes_per_s = float("inf")
    for case in CASES:
        bench = Bench(runner, config, case, sharded.local)
        bench.run(64, 64, 8)  # adapters into the pool
        for batch in BATCHES:
            ms = (bench.run(batch, 64, 144) - bench.run(batch, 64, 16)) / 128 * 1e3
            rows.append(_row(case.name, f"tpot, batch {batch}", ms, "ms"))
    return rows


def _row(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": value, "unit": unit}


def report(rows: list[dict[str, Any]], world: int, out: Path | None) -> None:
    alone: dict[tuple[str, str], float] = {}
    if (RESULTS / "h200_engine.json").is_file():
        known = json.loads((RESULTS / "h200_engine.json").read_text())["rows"]
        alone = {(row["case"], row["metric"]): row["value"] for row in known}
    lines = [
        f"# Tensor parallel on {world} H200",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}. Written by",
        f"`python -m load_tests.tensor_parallel_bench --world {world}`, which says what is measured.",
        "",
        f"| case | metric | unit | {world} GPUs | one GPU | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        one = alone.get((row["case"], row["metric"]))
        row["one_gpu"] = one
        ratio = "" if one is None else f"{one / row['value']:.2f}"
        cells = (row["case"], row["metric"], row["unit"], f"{row['value']:.2f}", one and f"{one:.2f}", ratio)
        lines.append(f"| {' | '.join(str(cell or '') for cell in cells)} |")
    print("\n".join(lines), flush=True)
    if out is not None:
        (out / f"h200_tp{world}.json").write_text(json.dumps({"rows": rows}, indent=2) + "\n")
        (out / f"h200_tp{world}.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    if "LORAFLEET_RANK" in os.environ:
        run_rank(int(os.environ["LORAFLEET_RANK"]), args.world, os.environ["LORAFLEET_RENDEZVOUS"])
        return 0
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = str(Path(directory) / "rendezvous")
        others = [
            subprocess.Popen(
                [sys.executable, "-m", "load_tests.tensor_parallel_bench", "--world", str(args.world)],
                env=os.environ | {"LORAFLEET_RANK": str(rank), "LORAFLEET_RENDEZVOUS": rendezvous},
            )
            for rank in range(1, args.world)
        ]
        try:
            report(run_rank(0, args.world, rendezvous), args.world, args.out)
        finally:
            for other in others:
                other.kill()
                other.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
