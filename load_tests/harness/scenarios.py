"""What goes wrong in a fleet, done to a small one of its own while it is under load.

    python -m load_tests.harness.scenarios [NAME ...] [--duration 60] [--out load_tests/results/scenarios]

cold-storm       24 adapters that nobody has used are asked for at once
thrash           four times as many adapters as a replica has slots, all equally
noisy-tenant     one adapter asks for thirty times its share, for a third of the time
replica-killed   an engine process ends without notice
s3-slow          the link to S3 gets slow, then well again
s3-down          the link is cut, then whole again
rollout          a new version of the most popular adapter, for half of its requests, then for all

Each fails if what it promises about errors and times does not hold. Times are for two cores; only the rules
count, not the figures.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from load_tests.conditions import machine
from load_tests.harness import report
from load_tests.harness.client import Record
from load_tests.harness.measure import measure, show
from load_tests.harness.plots import Mark
from load_tests.harness.summary import Slo, Summary, percentile
from load_tests.harness.tiny_fleet import NUM_ADAPTERS, NUM_SLOTS, TinyFleet, tiny_fleet
from load_tests.harness.workload import Planned, Preset, arrivals, plan

RATE = 5.0
NUM_WARM = 4  # adapters that are always in use
SLOW_S = 0.5  # a chunk of the slow link
RECOVERY_S = 20.0  # until a killed engine's place is taken by another one


def short(rng: random.Random) -> tuple[int, int]:
    return rng.randrange(16, 64), rng.randrange(8, 32)


WARM, ALL, ONE = Preset("zipf", short), Preset("power", short), Preset("identical", short)


@dataclass(frozen=True, slots=True)
class Disturbance:
    at: float  # part of the duration
    text: str
    do: Callable[[TinyFleet], None]


@dataclass(frozen=True, slots=True)
class Run:
    summary: Summary
    records: Sequence[Record]
    duration_s: float

    def errors(self, group: str = "all", after: float = 0.0, before: float = 1.0) -> list[Record]:
        """Of requests that were due in that part of the run."""
        low, high = after * self.duration_s, before * self.duration_s
        return [r for r in self.records if r.error and low <= r.planned < high and group in ("all", r.group)]


@dataclass(frozen=True, slots=True)
class Scenario:
    plan: Callable[[float, random.Random], list[Planned]]
    broken: Callable[[Run], list[str]]  # promises that were not kept
    disturbances: tuple[Disturbance, ...] = ()


def warm(duration_s: float, rng: random.Random) -> list[Planned]:
    return plan(WARM, arrivals(RATE, duration_s, 1.0, rng), NUM_WARM, rng, group="warm")


def cold_one_by_one(duration_s: float, rng: random.Random) -> list[Planned]:
    """Warm ones, and each second one that nobody has used for long."""
    others = Preset("distinct", short)
    times = (float(second) for second in range(1, int(duration_s)))
    cold = plan(others, times, NUM_ADAPTERS - NUM_WARM, rng, group="cold", first_adapter=NUM_WARM)
    return warm(duration_s, rng) + cold


def storm(duration_s: float, rng: random.Random) -> list[Planned]:
    times = iter([duration_s / 2] * (NUM_ADAPTERS - NUM_SLOTS))
    cold = Preset("distinct", short)
    return warm(duration_s, rng) + plan(
        cold, times, NUM_ADAPTERS - NUM_SLOTS, rng, group="cold", first_adapter=NUM_SLOTS
    )


def everybody(duration_s: float, rng: random.Random) -> list[Planned]:
    return plan(ALL, arrivals(RATE, duration_s, 1.0, rng), NUM_ADAPTERS, rng)


def noise(duration_s: float, rng: random.Random) -> list[Planned]:
    quiet = plan(ALL, arrivals(RATE, duration_s, 1.0, rng), NUM_WARM, rng, group="quiet", first_adapter=1)
    burst = (duration_s / 3 + time_s for time_s in arrivals(30 * RATE / NUM_WARM, duration_s / 3, 1.0, rng))
    return quiet + plan(ONE, burst, 1, rng, group="noisy")


def no_errors(run: Run) -> list[str]:
    return [f"{len(errors)} errors: {errors[0].error}"] if (errors := run.errors()) else []


def thrashes(run: Run) -> list[str]:
    ratio = run.summary.hit_ratio
    return no_errors(run) + ([] if ratio is not None and ratio < 0.9 else [f"hit ratio {ratio}: no thrash"])


def the_quiet_go_first(run: Run) -> list[str]:
    quiet, noisy = (run.summary.groups[name].ttft_s.get("p95", 0.0) for name in ("quiet", "noisy"))
    broken = [] if quiet < noisy else [f"quiet wait {quiet:.2f} s for a token, noisy {noisy:.2f} s"]
    return broken + [f"{len(errors)} quiet ones failed" for errors in [run.errors("quiet")] if errors]


def only_those_in_flight_fail(run: Run) -> list[str]:
    killed_s = run.duration_s / 2
    late = [r for r in run.errors() if r.sent > killed_s + RECOVERY_S or r.sent < killed_s - 30]
    in_flight = [r for r in run.records if r.sent <= killed_s and (r.error or (r.last or 0.0) >= killed_s)]
    broken = [f"{len(late)} failed long before or after"] if late else []
    streams = [r for r in run.errors() if r.first is not None and r not in in_flight]
    return broken + ([f"{len(streams)} streams of others broke"] if streams else [])


def warm_ones_feel_nothing(run: Run) -> list[str]:
    """While it was going on, in the middle third."""
    low, high = run.duration_s / 3, run.duration_s * 2 / 3
    during = [
        r.ttft_s
        for r in run.records
        if r.group == "warm" and r.ttft_s is not None and low <= r.planned < high
    ]
    slow = percentile(during, 0.95) if during else math.inf
    broken = [f"{len(errors)} warm ones failed" for errors in [run.errors("warm")] if errors]
    return broken + ([f"warm ones wait {slow:.2f} s for a token"] if slow > SLOW_S else [])


def slow_is_no_error(run: Run) -> list[str]:
    return no_errors(run) + warm_ones_feel_nothing(run)


def only_cold_ones_fail_and_not_for_long(run: Run) -> list[str]:
    broken = [] if run.errors("cold") else ["no cold one failed: was it down?"]
    after = run.errors(after=(run.duration_s * 2 / 3 + RECOVERY_S / 2) / run.duration_s)
    return (
        broken + warm_ones_feel_nothing(run) + ([f"{len(after)} failed after it was back"] if after else [])
    )


def _slow(fleet: TinyFleet) -> None:
    fleet.link.delay_s = SLOW_S


def _down(fleet: TinyFleet) -> None:
    fleet.link.is_cut = True


def _well(fleet: TinyFleet) -> None:
    fleet.link.delay_s, fleet.link.is_cut = 0.0, False


LAST = NUM_ADAPTERS - 1  # lends its weights to a new version
SCENARIOS = {
    "cold-storm": Scenario(storm, no_errors, (Disturbance(0.5, "24 cold adapters", lambda _: None),)),
    "thrash": Scenario(everybody, thrashes),
    "noisy-tenant": Scenario(noise, the_quiet_go_first),
    "replica-killed": Scenario(
        warm, only_those_in_flight_fail, (Disturbance(0.5, "an engine is killed", TinyFleet.kill_an_engine),)
    ),
    "s3-slow": Scenario(
        cold_one_by_one,
        slow_is_no_error,
        (Disturbance(1 / 3, "S3 slow", _slow), Disturbance(2 / 3, "S3 well", _well)),
    ),
    "s3-down": Scenario(
        cold_one_by_one,
        only_cold_ones_fail_and_not_for_long,
        (Disturbance(1 / 3, "S3 down", _down), Disturbance(2 / 3, "S3 up", _well)),
    ),
    "rollout": Scenario(
        warm,
        no_errors,
        (
            Disturbance(1 / 3, "canary, half", lambda fleet: fleet.load(0, LAST, canary_weight=0.5)),
            Disturbance(2 / 3, "all", lambda fleet: fleet.load(0, LAST)),
        ),
    ),
}


def disturb(fleet: TinyFleet, disturbances: Sequence[Disturbance], duration_s: float) -> list[str]:
    """Each in its time. Returns what could not be done: without it a promise is easily kept."""
    began, failed = time.monotonic(), []
    for one in disturbances:
        time.sleep(max(0.0, began + one.at * duration_s - time.monotonic()))
        try:
            one.do(fleet)
        except Exception as error:
            failed.append(f"{one.text}: could not be done: {error!r}")
    return failed


def run_scenario(name: str, duration_s: float, out: Path | None) -> list[str]:
    """Promises that were not kept."""
    scenario, rng = SCENARIOS[name], random.Random(0)
    planned = scenario.plan(duration_s, rng)
    with tiny_fleet() as fleet:
        # so that what is measured is the disturbance and not the start
        measure(fleet.target, warm(3.0, rng), Slo(), "warm-up")
        with ThreadPoolExecutor(1) as thread:
            disturbed = thread.submit(disturb, fleet, scenario.disturbances, duration_s)
            summary, records = measure(fleet.target, planned, Slo(), name)
    broken = disturbed.result() + scenario.broken(Run(summary, records, duration_s))
    show(summary)
    if out is not None:
        marks = [Mark(one.at * duration_s, one.text) for one in scenario.disturbances]
        conditions = {"rate": RATE, "duration": duration_s, "adapters": NUM_ADAPTERS, "slots": NUM_SLOTS}
        report.write(out / name, name, {**conditions, **machine()}, summary, records, broken, marks)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.harness.scenarios",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of each")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.names) - SCENARIOS.keys():
        parser.error(f"no scenario {min(unknown)!r}; there are {', '.join(SCENARIOS)}")
    all_broken = {n: run_scenario(n, options.duration, options.out) for n in options.names or SCENARIOS}
    for name, broken in all_broken.items():
        print(f"{name}: {'; '.join(broken) or 'as promised'}")
    return int(any(all_broken.values()))


if __name__ == "__main__":
    sys.exit(main())
