"""Replays traces against one simulated replica under different eviction policies. No GPU, no torch.

    python -m load_tests.replay [--out load_tests/results] [--scale 1.0] [--seeds 1] [--only NAME ...]

Writes replay.json, replay.md and replay.svg. `workloads.py` has the traces, `policies.py` who yields pages,
`replica.py` the time that steps, copies and reads take. Scheduler, page pool, prefix cache, adapter tiers and
engine core are the real ones, and the same for every policy. Host memory starts as full as it gets, the pool
starts empty; the first fifth of a trace is not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from load_tests.replay.policies import POLICIES
from load_tests.replay.replica import MAX_NUM_SEQS, Replica, StepModel
from load_tests.replay.results import OURS, Result, average, behind, plot, summarise, to_json, to_markdown
from load_tests.replay.workloads import POOL_PAGES, standard

COMMAND = "python -m load_tests.replay"


def replay(scale: float, num_seeds: int, only: Sequence[str]) -> list[Result]:
    model = StepModel.measured()
    results: list[Result] = []
    for makers in zip(*(standard(scale, seed) for seed in range(num_seeds)), strict=True):
        workloads = [maker() for maker in makers]
        if only and not any(name in workloads[0].name for name in only):
            continue
        for policy in POLICIES:
            begun = time.perf_counter()
            rows = []
            for workload in workloads:
                replica = Replica(workload, policy, model)
                replica.run()
                rows.append(summarise(workload, policy.name, replica))
            results.append(average(rows))
            _print(results[-1], time.perf_counter() - begun)
        ours = next(row for row in results if row.workload == workloads[0].name and row.policy == OURS)
        print(
            "  ours behind the best: " + " ".join(f"{lag:.1%}" for lag in behind(ours, results)), flush=True
        )
    return results


def _print(row: Result, seconds: float) -> None:
    print(
        f"{row.workload:20} {row.policy:18} hbm {row.hit_hbm:6.1%} host {row.hit_host:6.1%}"
        f" source {row.hit_source:6.1%}  ttft {row.ttft_p50_s * 1e3:8.1f} / {row.ttft_p99_s * 1e3:8.1f} ms"
        f" {row.tokens_per_s:7.0f} tok/s  ({seconds:.1f} s)",
        flush=True,
    )


def write(results: list[Result], model: StepModel, num_seeds: int, directory: Path) -> None:
    step = (
        f"max({model.base * 1e3:.2f}, {model.prefill * 1e3:.4f} a prefill token)"
        f" + {model.row * 1e3:.4f} a decode row + {model.rank * 1e3:.5f} a rank of each adapter in it"
    )
    conditions = {
        "step": step, "pool_pages": POOL_PAGES, "max_num_seqs": MAX_NUM_SEQS, "seeds": num_seeds
    }  # fmt: skip
    command = f"{COMMAND} --seeds {num_seeds}"
    (directory / "replay.json").write_text(json.dumps(to_json(results, command, conditions), indent=2) + "\n")
    (directory / "replay.md").write_text(to_markdown(results, command, conditions))
    plot(results, directory / "replay.svg")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of the durations")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=(), help="parts of workloads' names")
    args = parser.parse_args(argv)
    begun = time.perf_counter()
    results = replay(args.scale, args.seeds, args.only)
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.out:
        write(results, StepModel.measured(), args.seeds, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
