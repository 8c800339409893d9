"""The GPU engine without HTTP: throughput and time per output token, with and without adapters.

    python -m load_tests.engine_bench [--out load_tests/results]

Writes h200_engine.json and h200_engine.md, each figure beside vLLM 0.26's (FlashAttention 3, torch.compile,
CUDA graphs; measured earlier on the same kind of GPU with the same workload) and beside our goals.

Model: Llama-3-8B shape, bf16, random weights. Requests are greedy and ignore EOS; adapters are all-linear and
in host memory before the clock starts.

  throughput  256 requests at once, 512 prompt tokens, 128 output tokens; output tokens per second
  prefill     64 requests of 2032 prompt tokens, 1 output token; prompt tokens per second
  tpot        batch 1 / 64 / 256, 64 prompt tokens: (time of 144 - time of 16 output tokens) / 128
  GPU idle    steady decode at batch 64: share of the time in which no kernel and no copy runs, from a trace

Popularity: none; one adapter; 64 adapters zipf(1.0); 64 adapters, each request in turn another one; 64
adapters zipf with ranks 8, 16, 32, 64 in turn. Seed 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.adapters.layout import RowsOf, all_rows
from engine.config import EngineConfig
from engine.request import GenerateRequest
from engine.runner.cuda import CudaRunner
from engine.shape import ModelShape
from load_tests.conditions import gpu_conditions
from load_tests.random_engine import PAGE_TOKENS, SHAPE, SPEC, RandomEngine, random_weights

NUM_ADAPTERS = 64
MIXED_RANKS = (8, 16, 32, 64)
COMMAND = "python -m load_tests.engine_bench"
MAX_MODEL_LEN = 2048
NUM_PAGES = 24_000  # of 2 MiB: 256 x 640 tokens and 64 adapters of rank 64


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    ranks: tuple[int, ...]  # of the adapters
    popularity: str  # none | uniform | zipf

    def draw(self, count: int) -> list[int | None]:
        """An adapter for each request."""
        if self.popularity == "none":
            return [None] * count
        adapters = range(len(self.ranks))
        if self.popularity == "uniform":
            return [i % len(self.ranks) for i in range(count)]
        weights = [1.0 / (i + 1) for i in adapters]
        return list(random.Random(0).choices(adapters, weights, k=count))


CASES = (
    Case("no adapter", (), "none"),
    Case("one adapter, r16", (16,), "uniform"),
    Case("64 adapters zipf, r16", (16,) * NUM_ADAPTERS, "zipf"),
    Case("64 adapters distinct, r16", (16,) * NUM_ADAPTERS, "uniform"),
    Case("64 adapters zipf, ranks 8-64", MIXED_RANKS * (NUM_ADAPTERS // len(MIXED_RANKS)), "zipf"),
)


@dataclass(frozen=True, slots=True)
class Goal:
    vllm: float | None
    must: float
    moonshot: float | None


GOALS = {
    ("no adapter", "throughput"): Goal(6810, 6800, 7500),
    ("no adapter", "prefill"): Goal(43300, 43000, None),
    ("no adapter", "tpot, batch 1"): Goal(4.9, 4.9, 4.4),
    ("no adapter", "tpot, batch 64"): Goal(6.1, 6.1, 5.3),
    ("no adapter", "tpot, batch 256"): Goal(10.5, 10.5, 9.5),
    ("no adapter", "GPU idle, batch 64"): Goal(None, 5.0, None),
    ("one adapter, r16", "throughput"): Goal(3953, 6100, 6800),
    ("one adapter, r16", "tpot, batch 64"): Goal(9.5, 6.7, 5.6),
    ("64 adapters zipf, r16", "throughput"): Goal(3069, 5900, 6500),
    ("64 adapters zipf, r16", "prefill"): Goal(20400, 38000, None),
    ("64 adapters zipf, r16", "tpot, batch 64"): Goal(20.0, 7.3, 6.2),
    ("64 adapters distinct, r16", "throughput"): Goal(2826, 5600, 6200),
    ("64 adapters distinct, r16", "tpot, batch 64"): Goal(32.9, 7.9, 6.7),
    ("64 adapters zipf, ranks 8-64", "throughput"): Goal(2629, 5500, 6200),
    ("64 adapters zipf, ranks 8-64", "tpot, batch 64"): Goal(35.6, 8.0, 6.8),
}


class Bench:
    def __init__(
        self,
        runner: CudaRunner,
        config: EngineConfig,
        case: Case,
        shape: ModelShape = SHAPE,
        num_pages: int = NUM_PAGES,
        rows_of: RowsOf = all_rows,
    ) -> None:
        """`shape`: of this rank's part of the model. `rows_of`: what it holds of adapters."""
        self.case = case
        self._names = [f"{case.name}/{i}" for i in range(len(case.ranks))]
        ranks = dict(zip(self._names, case.ranks, strict=True))
        self._engine = RandomEngine(runner, config, num_pages, MAX_MODEL_LEN, ranks, shape, rows_of=rows_of)
        self.core = self._engine.core
        self._engine.read(self._names)
        self._num_runs = 0

    def run(self, num_requests: int, num_prompt: int, num_output: int) -> float:
        """Seconds from the first request to the last token."""
        requests = self._requests(num_requests, num_prompt, num_output)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for request in requests:
            self.core.add_request(request)
        num_tokens = 0
        while not self.core.is_idle:
            num_tokens += self._turn()
        assert num_tokens == num_requests * num_output
        return time.perf_counter() - started

    def idle_share(self, batch: int) -> float:
        """Of the GPU, in decode steps that follow each other."""
        profile = self.profile_decode(batch, 40)
        return idle_share(profile)

    def profile_decode(self, batch: int, num_steps: int) -> Any:
        """Of so many steps of decodes alone."""
        for request in self._requests(batch, 64, num_steps + 20):
            self.core.add_request(request)
        while self.core.scheduler.waiting:
            self._turn()
        for _ in range(5):
            self._turn()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num_steps):
                self._turn()
            torch.cuda.synchronize()
        while not self.core.is_idle:
            self._turn()
        return profile

    def _requests(self, num_requests: int, num_prompt: int, num_output: int) -> list[GenerateRequest]:
        rng = random.Random(self._num_runs)
        self._num_runs += 1
        return [
            self._engine.request(
                f"{self._num_runs}-{i}",
                [rng.randrange(SHAPE.vocab_size) for _ in range(num_prompt)],
                num_output,
                None if adapter is None else self._names[adapter],
            )
            for i, adapter in enumerate(self.case.draw(num_requests))
        ]

    def _turn(self) -> int:
        """One turn of the loop; its number of tokens."""
        return len(self._engine.turn())


def idle_share(profile: Any) -> float:
    """Of the time from the first to the last thing that the GPU did."""
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in profile.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
    )
    busy = 0.0
    end: float = spans[0][0]
    for begin, until in spans:
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    return float(1.0 - busy / (end - spans[0][0]))


def measure(bench: Bench) -> list[dict[str, Any]]:
    bench.run(64, 64, 8)  # adapters into the pool
    seconds = bench.run(256, 512, 128)
    rows = [{"case": bench.case.name, "metric": "throughput", "value": 256 * 128 / seconds, "unit": "tok/s"}]
    seconds = bench.run(64, 2048 - 16, 1)
    rows.append({"case": bench.case.name, "metric": "prefill", "value": 64 * 2032 / seconds, "unit": "tok/s"})
    for batch in (1, 64, 256):
        ms = (bench.run(batch, 64, 144) - bench.run(batch, 64, 16)) / 128 * 1e3
        rows.append({"case": bench.case.name, "metric": f"tpot, batch {batch}", "value": ms, "unit": "ms"})
    idle = bench.idle_share(64) * 100
    rows.append({"case": bench.case.name, "metric": "GPU idle, batch 64", "value": idle, "unit": "%"})
    return rows


def write_results(rows: list[dict[str, Any]], conditions: dict[str, str], directory: Path) -> None:
    for row in rows:
        goal = GOALS.get((row["case"], row["metric"]))
        row |= asdict(goal) if goal else {"vllm": None, "must": None, "moonshot": None}
    (directory / "h200_engine.json").write_text(
        json.dumps({"command": COMMAND, "conditions": conditions, "rows": rows}, indent=2) + "\n"
    )
    lines = [
        "# The engine on one H200",
        "",
        f"{', '.join(conditions.values())}. Written by `{COMMAND}`, which says what is measured.",
        "vLLM is 0.26, measured earlier on the same kind of GPU with the same workload.",
        "`must` and `moonshot` are goals that were set beforehand.",
        "",
        "| case | metric | unit | lorafleet | vLLM | must | moonshot |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        known = [row["vllm"], row["must"], row["moonshot"]]
        cells = [
            row["case"],
            row["metric"],
            row["unit"],
            f"{row['value']:.0f}" if row["value"] >= 1000 else f"{row['value']:.2f}",
        ]
        cells += ["" if value is None else f"{value:g}" for value in known]
        lines.append(f"| {' | '.join(cells)} |")
    (directory / "h200_engine.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers, from 0")
    args = parser.parse_args(argv)
    config = EngineConfig(
        model="random", device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, max_rank=64,
        max_adapters=NUM_ADAPTERS, host_cache_bytes=64 << 30, prefix_cache=False,
    )  # fmt: skip
    weights = random_weights()
    rows: list[dict[str, Any]] = []
    conditions = gpu_conditions()
    for case in [CASES[i] for i in args.cases]:
        # a pool of its own for each case: adapters of the one before must not be there
        begun = time.perf_counter()
        runner = CudaRunner(SPEC, weights, config, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN)
        runner.warm_up()
        print(f"{case.name}: graphs captured in {time.perf_counter() - begun:.1f} s", flush=True)
        measured = measure(Bench(runner, config, case))
        rows += measured
        for row in measured:
            print(f"{row['case']:30} {row['metric']:20} {row['value']:10.2f} {row['unit']}", flush=True)
        del runner
        torch.cuda.empty_cache()
    if args.out:
        write_results(rows, conditions, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
