"""Scenarios plan what they say and notice a broken promise; the slow tests run each one."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import cast

import pytest

from load_tests.harness.client import Record
from load_tests.harness.scenarios import (
    NUM_WARM,
    RATE,
    RECOVERY_S,
    SCENARIOS,
    SLOW_S,
    Disturbance,
    Run,
    disturb,
    noise,
    storm,
    warm_ones_feel_nothing,
)
from load_tests.harness.summary import Slo, summarise
from load_tests.harness.tiny_fleet import NUM_ADAPTERS, NUM_SLOTS, TinyFleet

DURATION_S = 90.0


def record(planned: float, group: str = "warm", ttft_s: float = 0.1, error: str | None = None) -> Record:
    if error:
        return Record(planned, "a", group, 3, sent=planned, error=error)
    first = planned + ttft_s
    return Record(planned, "a", group, 3, planned, first, first + 0.2, 5)


def broken(name: str, *records: Record, hits: dict[str, float] | None = None) -> list[str]:
    usual = [record(float(second)) for second in range(int(DURATION_S))]
    everything = [*usual, *records]
    return SCENARIOS[name].broken(Run(summarise(everything, Slo(), hits), everything, DURATION_S))


@pytest.mark.parametrize("name", SCENARIOS)
def test_plans_ask_for_adapters_that_there_are(name: str) -> None:
    planned = SCENARIOS[name].plan(30.0, random.Random(0))
    assert len(planned) > 30 * RATE * 0.7
    assert all(0 <= request.adapter < NUM_ADAPTERS and request.time_s < 30.0 for request in planned)
    assert all(0 < one.at < 1 for one in SCENARIOS[name].disturbances)


def test_a_storm_is_of_adapters_that_no_warm_request_asks_for() -> None:
    planned = storm(30.0, random.Random(0))
    cold = [request for request in planned if request.group == "cold"]
    assert {request.time_s for request in cold} == {15.0}
    assert [request.adapter for request in cold] == list(range(NUM_SLOTS, NUM_ADAPTERS))
    assert {r.adapter for r in planned if r.group == "warm"} <= set(range(NUM_WARM))


def test_noise_is_one_adapters_and_thirty_times_a_share() -> None:
    counts = Counter((request.group, request.adapter) for request in noise(60.0, random.Random(0)))
    quiet = [count for (group, _), count in counts.items() if group == "quiet"]
    assert ("noisy", 0) in counts
    assert ("quiet", 0) not in counts
    # for a third of the time
    assert counts["noisy", 0] == pytest.approx(10 * sum(quiet) / len(quiet), rel=0.25)


@pytest.mark.parametrize("name", ["cold-storm", "rollout", "s3-slow"])
def test_an_error_breaks_the_promise(name: str) -> None:
    assert broken(name) == []
    assert broken(name, record(40.0, error="overloaded"))


def test_thrash_must_show() -> None:
    assert broken("thrash", hits={"hbm": 50.0, "source": 50.0}) == []
    assert broken("thrash", hits={"hbm": 99.0, "source": 1.0})


def test_the_quiet_must_not_wait_longer_than_the_noisy() -> None:
    quiet, noisy = record(30.0, "quiet", 0.2), record(30.0, "noisy", 2.0)
    assert broken("noisy-tenant", quiet, noisy) == []
    assert broken("noisy-tenant", replace(quiet, first=35.0), noisy)
    assert broken("noisy-tenant", quiet, noisy, record(31.0, "quiet", error="overloaded"))
    assert broken("noisy-tenant", quiet, noisy, record(31.0, "noisy", error="overloaded")) == []


def test_a_killed_replica_takes_its_own_streams_only() -> None:
    killed_s = DURATION_S / 2
    own = record(killed_s - 0.5, error="engine_dead")
    assert broken("replica-killed", own) == []
    assert broken("replica-killed", record(killed_s + RECOVERY_S + 1, error="unavailable"))
    cut = replace(record(killed_s + 1.0), error="engine_dead")
    assert broken("replica-killed", cut), "it had come to a replica that lives"


def test_while_s3_is_slow_or_down_warm_adapters_feel_nothing() -> None:
    during = DURATION_S / 2
    gone = record(during, "cold", error="unavailable")
    assert broken("s3-down", gone) == []
    assert broken("s3-down"), "nobody noticed"
    assert broken("s3-down", gone, record(during, error="unavailable"))
    assert broken("s3-down", gone, record(DURATION_S - 1, "cold", error="unavailable"))
    late = [record(during + i / 10, ttft_s=SLOW_S * 2) for i in range(5)]
    assert broken("s3-slow", *late)
    assert broken("s3-slow", record(during, "cold", ttft_s=9.0)) == []


@pytest.mark.cluster
def test_warm_adapters_of_which_none_is_answered_break_the_promise() -> None:
    records = [record(second, error="x") for second in range(int(DURATION_S))]
    run = Run(summarise(records, Slo()), records, DURATION_S)
    assert len(warm_ones_feel_nothing(run)) == 2


def test_what_could_not_be_done_to_the_fleet_is_told() -> None:
    """A fleet that nobody disturbed keeps every promise."""
    done: list[TinyFleet] = []

    def fail(fleet: TinyFleet) -> None:
        raise OSError("no way")

    what = (Disturbance(0.0, "rollout", fail), Disturbance(0.5, "well", done.append))
    fleet = cast("TinyFleet", object())
    (told,) = disturb(fleet, what, 0.02)
    assert told.startswith("rollout")
    assert done == [fleet]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_runs_and_keeps_its_promise(name: str) -> None:
    """Two minutes each, most of them the start: `pytest -m slow tests/load_tests/harness`."""
    command = [sys.executable, "-m", "load_tests.harness.scenarios", name, "--duration", "60"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
