"""The simulated replica on short traces: it serves everybody, always alike, and policies differ."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from engine.memory import Needed
from engine.page_pool import Owner, PageKind
from load_tests.replay.__main__ import replay, write
from load_tests.replay.policies import OURS, POLICIES, Policy
from load_tests.replay.replica import Replica, StepModel
from load_tests.replay.results import Result, behind, summarise
from load_tests.replay.workloads import (
    Arrival,
    Workload,
    bursts,
    chameleon,
    slora,
    standard,
    start,
    thrash,
    zipf,
)


@cache
def run(make: object, policy: Policy = OURS) -> Result:
    """`make` takes nothing and makes a workload."""
    workload: Workload = make()  # type: ignore[operator]
    replica = Replica(workload, policy, StepModel.measured())
    replica.run()
    assert len(replica.first_token) == len(workload.arrivals)
    assert replica.core.memory.pool.num_used(PageKind.SEQUENCE) == 0
    replica.core.check_invariants()
    return summarise(workload, policy.name, replica)


def fits() -> Workload:
    return thrash(True, 3.0)


def thrashes() -> Workload:
    return thrash(False, 3.0)


def saturated() -> Workload:
    return slora(1000, 3.0)


def skewed() -> Workload:
    return zipf(1.0, 6.0)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_policy_serves_everybody(policy: Policy) -> None:
    result = run(skewed, policy)
    assert result.hit_hbm + result.hit_host + result.hit_source == pytest.approx(1.0)


def test_a_replay_is_deterministic() -> None:
    assert run(fits) == run.__wrapped__(fits)


def test_a_static_area_is_never_exceeded() -> None:
    workload = chameleon(3.0)
    policy = next(policy for policy in POLICIES if policy.name == "static 25%")
    replica = Replica(workload, policy, StepModel.measured())
    memory = replica.core.memory
    most = 0
    take = memory.take

    def watch(owner: Owner, num_pages: int, needed: Needed) -> tuple[int, ...]:
        nonlocal most
        page_ids = take(owner, num_pages, needed)
        most = max(most, memory.pool.num_used(PageKind.ADAPTER))
        return page_ids

    memory.take = watch  # type: ignore[method-assign]
    replica.run()
    assert workload.pool_pages * 0.2 < most <= workload.pool_pages * 0.25


def test_a_working_set_of_twice_the_pool_keeps_the_time_to_the_first_token() -> None:
    assert run(thrashes).hit_hbm < run(fits).hit_hbm
    assert run(thrashes).ttft_p50_s < 3 * run(fits).ttft_p50_s


def test_ours_is_not_behind_where_adapters_press_the_pool() -> None:
    results = [
        run(saturated, policy) for policy in POLICIES if policy.name not in ("static 10%", "static 25%")
    ]
    assert behind(results[0], results)[0] < 0.03


def test_ours_keeps_more_of_a_skewed_working_set_than_dropping_idle_adapters() -> None:
    drops_idle = next(policy for policy in POLICIES if policy.drops_idle)
    assert run(skewed).hit_hbm > 1.2 * run(skewed, drops_idle).hit_hbm


def test_a_step_costs_what_was_measured() -> None:
    model = StepModel.measured()
    rows = json.loads((Path(__file__).parents[2] / "load_tests/results/h200_engine.json").read_text())["rows"]
    value = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert model.seconds(0, 64, 0) * 1e3 == pytest.approx(value["no adapter", "tpot, batch 64"], rel=0.01)
    assert model.seconds(0, 64, 64 * 16) * 1e3 == pytest.approx(
        value["64 adapters distinct, r16", "tpot, batch 64"], rel=0.01
    )


def test_an_adapter_that_must_be_read_takes_the_time_of_the_source() -> None:
    workload = Workload("one", (16,), (Arrival(0.0, 0, (1, 2, 3), 4),) * 3, 1.0, host_bytes=1 << 30)
    replica = Replica(workload, OURS, StepModel.measured())
    replica.core.manager.drop("a0")
    replica.run()
    seconds = 0.05 + 40 * (2 << 20) / 1e9
    assert all(seconds < at < seconds + 0.03 for at in replica.first_token.values())


def test_results_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = replay(0.05, 2, ["punica-skewed"])
    write(results, StepModel.measured(), 2, tmp_path)
    assert len(json.loads((tmp_path / "replay.json").read_text())["rows"]) == len(POLICIES)
    assert (tmp_path / "replay.md").read_text().count("| punica-skewed |") == len(POLICIES)
    assert "<svg" in (tmp_path / "replay.svg").read_text()
    assert "ours behind the best" in capsys.readouterr().out


def test_the_standard_workloads_are_seeded() -> None:
    for makers in zip(standard(0.02), standard(0.02), standard(0.02, seed=1), strict=True):
        first, again, other = (maker().arrivals for maker in makers)
        assert first == again != other


def test_a_replay_needs_no_torch() -> None:
    code = "import sys, load_tests.replay.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_memory_of_two_thousand_adapters_costs_at_most_a_tenth_of_the_throughput() -> None:
    """Copies, reads, less room for KV; without the time to read them in every step, which is kernels'."""
    model = replace(StepModel.measured(), rank=0.0)
    rates = []
    for n in (5, 2000):
        workload = slora(n, 5.0)
        replica = Replica(workload, OURS, model)
        replica.run()
        rates.append(summarise(workload, OURS.name, replica).tokens_per_s)
    assert rates[1] > 0.9 * rates[0]


def starts() -> Workload:
    return start(20.0)


def has_bursts() -> Workload:
    return bursts(20.0)


def test_prefetching_helps_at_the_start_and_after_bursts_and_hints_help_more() -> None:
    unaided, hinted = (p for p in POLICIES if p.name in ("ours, no prefetch", "ours, hints"))
    for make in (starts, has_bursts):
        without, ours, hints = (run(make, policy) for policy in (unaided, OURS, hinted))
        assert without.hit_hbm + 0.05 < ours.hit_hbm < hints.hit_hbm
        assert ours.tokens_per_s > 0.99 * without.tokens_per_s
    without, ours, hints = (run(starts, policy) for policy in (unaided, OURS, hinted))
    assert without.ttft_p50_s > 1.05 * ours.ttft_p50_s > 1.05 * 1.05 * hints.ttft_p50_s
