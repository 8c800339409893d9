"""What hints to replicas spare requests that wait for a place, in simulation.

    python -m load_tests.router_hints_bench [--out load_tests/results]

One core, no GPU, half a minute. Eight replicas that cost what the engine took on an H200, 2000 adapters, zipf
1.0, and for five of every ten seconds half more requests than they can serve. The same requests with and
without hints. Fails if one of `claims` does not hold.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, quantiles

from load_tests.router_bench import GPU_OBJECTIVE, gpu_cost
from router.simulator import Setup, requests_per_s
from router.simulator_replica import ReplicaSpec, Request
from router.simulator_rules import Ours
from router.simulator_traffic import Lengths, poisson, zipf
from router.simulator_turns import TurnsFleet

NUM_REPLICAS, NUM_ADAPTERS, WARM_UP_S, DURATION_S = 8, 2000, 10.0, 40.0
PEAK, CALM = 1.5, 0.3  # of what the fleet can serve
SEEDS = (0, 1)
LENGTHS = Lengths()
SPEC = ReplicaSpec(seats=16, slots=32, host_slots=128, cost=gpu_cost())
CASES = {
    "loads of 0.3 s": SPEC,
    "64 seats": replace(SPEC, seats=64),
    "host memory for 40 adapters": replace(SPEC, host_slots=40),
    "loads of 1 s, a bottleneck": replace(SPEC, load_s=1.0),
}


@dataclass(frozen=True, slots=True)
class Row:
    waited: float  # share of requests that waited in a router
    cold: float  # of these, share that found its adapter neither in HBM nor in host memory
    loads_per_1000: float
    hints_per_1000: float
    ttft_mean_s: float
    ttft_p99_s: float


def measure(spec: ReplicaSpec, with_hints: bool) -> Row:
    """Mean of the seeds."""
    capacity = NUM_REPLICAS * requests_per_s(spec, LENGTHS, Ours)
    setup = Setup(NUM_REPLICAS, spec, GPU_OBJECTIVE, warm_up_s=WARM_UP_S)

    def rate(now: float) -> float:
        return capacity * (PEAK if now % 10.0 < 5.0 else CALM)

    rows = []
    for seed in SEEDS:
        fleet = TurnsFleet(setup, seed, with_hints)
        result = fleet.run(poisson(rate, DURATION_S, zipf(NUM_ADAPTERS), LENGTHS, seed))
        done = [request for request in fleet.done if request.arrived >= WARM_UP_S]
        hints = 1000 * fleet.num_hints / len(fleet.done)
        rows.append(_row(done, result.cold_per_1000, hints))
    return Row(*(fmean(column) for column in zip(*map(_values, rows), strict=True)))


def _row(done: list[Request], loads_per_1000: float, hints_per_1000: float) -> Row:
    waited = [request for request in done if request.num_retries]
    ttft = [request.first_token - request.arrived for request in done]
    return Row(
        waited=len(waited) / len(done),
        cold=fmean(request.is_cold for request in waited),
        loads_per_1000=loads_per_1000,
        hints_per_1000=hints_per_1000,
        ttft_mean_s=fmean(ttft),
        ttft_p99_s=quantiles(ttft, n=100)[98],
    )


def _values(row: Row) -> tuple[float, ...]:
    return tuple(getattr(row, name) for name in Row.__slots__)


def claims(case: str, without: Row, hinted: Row) -> dict[str, bool]:
    found = {
        "no more loads": hinted.loads_per_1000 <= 1.03 * without.loads_per_1000,
        "no later first tokens": hinted.ttft_mean_s <= 1.06 * without.ttft_mean_s,
        "fewer cold ones of those that waited": hinted.cold < without.cold,
    }
    if "bottleneck" not in case:
        found["a quarter fewer of these"] = hinted.cold <= 0.75 * without.cold
    return {f"{case}: {claim}": holds for claim, holds in found.items()}


def table(rows: dict[str, tuple[Row, Row]]) -> str:
    lines = [
        "| case | hints | waited | cold of these | loads per 1000 | hints per 1000 | TTFT mean, s | p99, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, pair in rows.items():
        for name, row in zip(("without", "with"), pair, strict=True):
            lines.append(
                f"| {case} | {name} | {row.waited:.0%} | {row.cold:.1%} | {row.loads_per_1000:.0f} "
                f"| {row.hints_per_1000:.0f} | {row.ttft_mean_s:.2f} | {row.ttft_p99_s:.1f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = {case: (measure(spec, False), measure(spec, True)) for case, spec in CASES.items()}
    text = table(rows)
    print(text)
    found = {claim: holds for case, pair in rows.items() for claim, holds in claims(case, *pair).items()}
    print("\n".join(f"{'holds' if holds else 'FAILS'}  {claim}" for claim, holds in found.items()))
    if args.out:
        command = "python -m load_tests.router_hints_bench --out load_tests/results"
        head = f"# Hints, simulated\n\nWritten by `{command}`, which says what is simulated.\n\n"
        tail = "\n".join(
            f"- {'holds' if holds else 'does not hold'}: {claim}" for claim, holds in found.items()
        )
        (args.out / "router_hints.md").write_text(f"{head}{text}\n\n## Claims\n\n{tail}\n")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
