"""What one routing decision costs, at 3, 100 and 1000 replicas.

    python -m load_tests.router_bench_decision [--out load_tests/results]

100,000 adapters, zipf 1.0; each replica holds 200 and is up to nine tenths full. Time of the processor,
so that a busy machine counts little; the median of five runs. Fails above 50 µs in the mean at 1000 replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles
from typing import Any

from router.fleet_table import Report
from router.policy import ResidencyPolicy, RouteRequest

SIZES = (3, 100, 1000)
NUM_ADAPTERS, HELD, SEATS = 100_000, 200, 64
NUM_DECISIONS, NUM_RUNS = 10_000, 5
MOST_US = 50.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(size) for size in SIZES]
    print(json.dumps(rows, indent=2))
    if args.out:
        data = {
            "command": "python -m load_tests.router_bench_decision --out load_tests/results",
            "rows": rows,
        }
        (args.out / "router_decision.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0 if rows[-1]["mean_us"] <= MOST_US else 1


def measure(num_replicas: int) -> dict[str, Any]:
    rng = Random(0)
    names = [f"adapter-{i}" for i in range(NUM_ADAPTERS)]
    weights = list(accumulate(1 / (i + 1) for i in range(NUM_ADAPTERS)))
    reasons: Counter[str] = Counter()
    means, p50s, p99s = [], [], []
    for _ in range(NUM_RUNS):
        policy = _policy(num_replicas, names, weights, rng)
        times = []
        for i, adapter in enumerate(rng.choices(names, cum_weights=weights, k=NUM_DECISIONS)):
            now, request = i * 1e-4, RouteRequest(adapter, 200, prefix=i % 7)
            policy.arrived(adapter, now)
            started = time.thread_time()
            choice = policy.choose(request, now)
            times.append(1e6 * (time.thread_time() - started))
            reasons[choice.reason] += 1
        cuts = quantiles(times, n=100)
        means.append(fmean(times))
        p50s.append(cuts[49])
        p99s.append(cuts[98])
    return {
        "replicas": num_replicas,
        "mean_us": round(median(means), 1),
        "p50_us": round(median(p50s), 1),
        "p99_us": round(median(p99s), 1),
        "reasons": {reason: count / reasons.total() for reason, count in sorted(reasons.items())},
    }


def _policy(num_replicas: int, names: list[str], weights: list[float], rng: Random) -> ResidencyPolicy:
    policy = ResidencyPolicy(rng)
    for i in range(num_replicas):
        policy.table.add(f"replica-{i}", SEATS, 2 * SEATS)
        held = frozenset(rng.choices(names, cum_weights=weights, k=HELD))
        load = rng.randrange(int(0.9 * SEATS))
        free, idle = rng.randrange(3), rng.randrange(HELD)
        policy.table.tell(
            f"replica-{i}", Report(held, num_requests=load, free_slots=free, idle_slots=idle), 0.0
        )
    return policy


if __name__ == "__main__":
    sys.exit(main())
