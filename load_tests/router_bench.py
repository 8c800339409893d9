"""Where requests go, in simulation: our policy and the rules of others, on the same fleets and traffic.

    python -m load_tests.router_bench [--out load_tests/results] [--scale 1.0]

One core, no GPU. Replicas cost what the engine took on an H200 (`results/h200_engine.json`), CPU replicas
what a small model takes there. Conversations are lognormal. Every rule sees the same reports, 0.2 s old,
through routers that share nothing. What arrives in the warm-up is not measured. Fails if one of `claims` does
not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine.step_cost import StepCost
from router.simulator import Failure, Fleet, Objective, Result, Setup, requests_per_s
from router.simulator_replica import ReplicaSpec
from router.simulator_rules import RULES
from router.simulator_traffic import Arrival, Lengths, bursty, one_hot, poisson, shifting, zipf

RESULTS = Path(__file__).parent / "results"
OURS = "lorafleet"
PAGES_PER_RANK = 2.5  # Llama-3-8B, all linears, pages of 2 MiB
HOT_FROM_S, HOT_UNTIL_S = 20.0, 60.0


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    text: str
    setup: Setup
    arrivals: Callable[[], Iterator[Arrival]]
    watch: str | None = None


def gpu_cost(path: Path = RESULTS / "h200_engine.json") -> StepCost:
    """From what was measured without adapters and with 64 distinct ones of rank 16."""
    rows = json.loads(path.read_text())["rows"]
    value = {(row["case"], row["metric"]): row["value"] for row in rows}
    one, many = (value["no adapter", f"tpot, batch {batch}"] / 1e3 for batch in (1, 64))
    distinct = value["64 adapters distinct, r16", "tpot, batch 64"] / 1e3
    return StepCost(
        base_s=one,
        prefill_s=1.0 / value["no adapter", "prefill"],
        row_s=(many - one) / 63,
        lora_page_s=(distinct - many) / (64 * 16 * PAGES_PER_RANK),
    )


CPU = ReplicaSpec(
    seats=8, slots=8, host_slots=16, adapter_pages=8, load_s=0.5,
    cost=StepCost(base_s=0.02, prefill_s=1e-3, row_s=4e-3, lora_page_s=2e-4),
)  # fmt: skip
CPU_OBJECTIVE = Objective(ttft_s=1.0, token_s=0.15)
CPU_LENGTHS = Lengths(prompt_median=40, output_median=32, sigma=0.5)
GPU_OBJECTIVE = Objective(ttft_s=1.0, token_s=0.03)


def scenarios(scale: float = 1.0) -> list[Scenario]:
    """`scale`: of durations."""
    gpu = ReplicaSpec(seats=64, slots=32, host_slots=128, cost=gpu_cost())
    three = Setup(3, CPU, CPU_OBJECTIVE, warm_up_s=20 * scale)
    fleet = Setup(16, gpu, GPU_OBJECTIVE, warm_up_s=15 * scale)
    large = Setup(1000, replace(gpu, seats=16, slots=16, host_slots=64), GPU_OBJECTIVE, 4, 10 * scale)
    busy, num_adapters, rate = 45 * scale, 2000, 16 * 18.0
    lengths = Lengths()
    dying = tuple(Failure((20 + 6 * i) * scale, (i,), down_s=10.0) for i in range(4))
    popular = zipf(num_adapters)
    return [
        Scenario("three replicas", "3 CPU replicas of 8 slots, 60 adapters, zipf 1.0, 7 requests/s",
                 three, lambda: poisson(lambda _: 7.0, 320 * scale, zipf(60), CPU_LENGTHS, 1)),
        Scenario("zipf", f"16 replicas of 32 slots, {num_adapters} adapters, zipf 1.0, {rate:.0f} requests/s",
                 fleet, lambda: poisson(lambda _: rate, busy, popular, lengths, 2)),
        Scenario("bursts", "the same; adapters ask in bursts of 12, as functions in Azure do",
                 fleet, lambda: bursty(rate, busy, popular, lengths, 3)),
        Scenario("shifting", "the same; every 8 s other adapters are the popular ones",
                 fleet, lambda: poisson(lambda _: rate, busy, shifting(num_adapters, 8.0), lengths, 4)),
        Scenario("failures", "the same; 4 replicas die one after another and come back empty",
                 replace(fleet, failures=dying), lambda: poisson(lambda _: rate, busy, popular, lengths, 5)),
        Scenario("cold S3", "the same; a load takes 1.5 s, of 16 at a time",
                 replace(fleet, spec=replace(gpu, load_s=1.5, max_parallel_loads=16)),
                 lambda: poisson(lambda _: rate, busy, popular, lengths, 6)),
        Scenario("large", "1000 replicas of 16 slots, 100,000 adapters, zipf 1.0, 2000 requests/s",
                 large, lambda: poisson(lambda _: 2000.0, 20 * scale, zipf(100_000), lengths, 7)),
        hot(),
    ]  # fmt: skip


def hot() -> Scenario:
    """FR-60."""
    capacity = requests_per_s(CPU, CPU_LENGTHS, RULES[OURS])

    def rate_of_hot(now: float) -> float:
        return capacity * (3.0 if HOT_FROM_S <= now < HOT_UNTIL_S else 0.1)

    pick = one_hot(zipf(20), 99, rate_of_hot, other_rate=0.5)
    text = f"one adapter at 3 times what a replica serves, from {HOT_FROM_S:.0f} to {HOT_UNTIL_S:.0f} s"
    return Scenario(
        "hot", f"4 CPU replicas; {text}", Setup(4, CPU, CPU_OBJECTIVE, warm_up_s=5.0),
        lambda: poisson(lambda now: rate_of_hot(now) + 0.5, 100, pick, CPU_LENGTHS, 8), watch="a99",
    )  # fmt: skip


def run(scenario: Scenario, rule: str) -> Result:
    return Fleet(scenario.setup, RULES[rule], watch=scenario.watch).run(scenario.arrivals())


Results = dict[str, dict[str, Result]]  # by scenario, by rule


def claims(results: Results) -> dict[str, bool]:
    """What must hold, and whether it does."""
    found = {}
    for scenario, rows in results.items():
        ours = rows[OURS]
        if scenario == "hot":
            copies = dict(ours.copies)
            hot_after_10_s = min(copies[t] for t in copies if HOT_FROM_S + 10 <= t < HOT_UNTIL_S)
            calm = max(copies[t] for t in copies if t >= HOT_UNTIL_S + 15)
            found["hot: three replicas or more answer it within 10 s"] = hot_after_10_s >= 3
            found["hot: one replica answers it when it is calm again"] = calm <= 1
            continue
        for other in "random", "Serve multiplexing":
            # elsewhere most loads are the first ones of their adapters, which no rule can spare
            share = 0.7 if other == "random" or scenario == "three replicas" else 1.0
            fewer = ours.cold_per_1000 <= share * rows[other].cold_per_1000
            found[f"{scenario}: at most {share:.0%} of the cold loads of {other}"] = fewer
            slower = 1.0 if scenario == "three replicas" else 1.1
            p99 = ours.ttft_p99_s <= slower * rows[other].ttft_p99_s
            found[f"{scenario}: p99 at most {slower:.0%} of that of {other}"] = p99
    return found


def table(name: str, text: str, rows: dict[str, Result]) -> str:
    lines = [
        f"## {name}", "", text, "",
        "| rule | cold loads per 1000 | TTFT p50, ms | p99, ms | token p99, ms | imbalance | in objective |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {rule} | {r.cold_per_1000:.0f} | {1e3 * r.ttft_p50_s:.0f} | {1e3 * r.ttft_p99_s:.0f} "
        f"| {1e3 * r.token_p99_s:.1f} | {r.imbalance:.2f} | {r.attainment:.1%} |"
        for rule, r in rows.items()
    ]
    reasons = rows[OURS].reasons
    total = sum(reasons.values())
    shares = ", ".join(f"{reason} {count / total:.1%}" for reason, count in sorted(reasons.items()))
    return "\n".join([*lines, "", f"lorafleet's reasons: {shares}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="of the durations")
    args = parser.parse_args()

    started = time.monotonic()
    results: Results = {}
    texts = []
    for scenario in scenarios(args.scale):
        results[scenario.name] = {rule: run(scenario, rule) for rule in RULES}
        texts.append(table(scenario.name, scenario.text, results[scenario.name]))
        print(texts[-1], flush=True)
    found = claims(results)
    print("\n".join(f"{'holds' if holds else 'FAILS'}  {claim}" for claim, holds in found.items()))
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s")
    if args.out:
        write(args.out, results, texts, found, seconds)
    return 0 if all(found.values()) else 1


def write(out: Path, results: Results, texts: list[str], found: dict[str, bool], seconds: float) -> None:
    from load_tests.router_plot import plot

    rows: dict[str, Any] = {
        scenario: {rule: asdict(result) for rule, result in rules.items()}
        for scenario, rules in results.items()
    }
    command = "python -m load_tests.router_bench --out load_tests/results"
    data = {"command": command, "seconds": round(seconds), "claims": found, "results": rows}
    (out / "router.json").write_text(json.dumps(data, indent=1) + "\n")
    head = [
        "# Routing, simulated", "",
        f"Written by `{command}`, which says what is simulated.",
        "Imbalance is the deviation over the mean of the tokens that replicas were asked for. The objective",
        "is a first token within 1 s and then a token every 30 ms (150 ms on a CPU) in the mean.", "",
        "![The rules compared](router.svg)", "",
    ]  # fmt: skip
    tail = [f"- {'holds' if holds else 'does not hold'}: {claim}" for claim, holds in found.items()]
    (out / "router.md").write_text("\n".join([*head, *texts, "## Claims", "", *tail]) + "\n")
    plot(results, out / "router.svg")


if __name__ == "__main__":
    sys.exit(main())
