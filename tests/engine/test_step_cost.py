"""The cost of a step is found again from steps that were made from it."""

from __future__ import annotations

from random import Random

import pytest

from engine.step_clock import StepClock
from engine.step_cost import MIN_STEPS, StepCost, StepCostFit, StepWork

TRUE = StepCost(base_s=0.005, prefill_s=2.4e-5, row_s=3e-5, lora_page_s=1e-6)


def seconds(work: StepWork, cost: StepCost = TRUE) -> float:
    prefill, row, page = work
    return cost.base_s + cost.prefill_s * prefill + cost.row_s * row + cost.lora_page_s * page


def some_work(rng: Random) -> StepWork:
    return StepWork(rng.choice((0, 0, 0, 64, 500)), rng.randrange(64), rng.randrange(2000))


@pytest.mark.parametrize("seed", range(5))
def test_the_coefficients_are_found_again(seed: int) -> None:
    rng, fit = Random(seed), StepCostFit()
    for _ in range(500):
        work = some_work(rng)
        fit.observe(work, seconds(work) * rng.uniform(0.98, 1.02))
    cost = fit.cost()
    assert cost is not None
    assert cost == pytest.approx(TRUE, rel=0.1)


def test_what_was_true_before_is_forgotten() -> None:
    """Warm-up steps take seconds; a machine may become slower."""
    rng, fit = Random(0), StepCostFit()
    for factor, count in ((100.0, 20), (1.0, 3000)):
        for _ in range(count):
            work = some_work(rng)
            fit.observe(work, factor * seconds(work))
    assert fit.cost() == pytest.approx(TRUE, rel=0.05)


@pytest.mark.parametrize("with_prefill", [True, False])
def test_what_has_not_been_seen_for_an_hour_costs_what_it_did(with_prefill: bool) -> None:
    """Steps without adapters, or of decodes alone: what is known of others fades out of a float's range."""
    rng, fit = Random(0), StepCostFit()
    for _ in range(500):
        work = some_work(rng)
        fit.observe(work, seconds(work))
    for step in range(160_000):
        work = some_work(rng)._replace(lora_pages=0)
        if not with_prefill:
            work = work._replace(prefill_tokens=0)
        fit.observe(work, seconds(work))
        if step % 1000 == 0:
            assert fit.cost() == pytest.approx(TRUE, rel=0.1)
    assert fit.cost() == pytest.approx(TRUE, rel=0.1)


def test_no_coefficient_is_negative() -> None:
    rng, fit = Random(1), StepCostFit()
    for _ in range(200):
        work = some_work(rng)
        fit.observe(work, 0.01 - 1e-5 * work.decode_rows)
    cost = fit.cost()
    assert cost is not None
    assert cost.row_s == 0.0
    assert min(cost) >= 0.0


def test_steps_that_are_all_alike_give_their_own_cost() -> None:
    fit, work = StepCostFit(), StepWork(0, 8, 40)
    for _ in range(MIN_STEPS):
        fit.observe(work, 0.02)
    cost = fit.cost()
    assert cost is not None
    assert seconds(work, cost) == pytest.approx(0.02, rel=1e-3)


def test_too_few_steps_tell_nothing() -> None:
    fit = StepCostFit()
    for _ in range(MIN_STEPS - 1):
        fit.observe(StepWork(1, 1, 1), 0.01)
    assert fit.cost() is None


def test_the_clock_times_the_step_that_was_collected() -> None:
    """Two in flight: the second one begins when the first one ends."""
    clock, work = StepClock(), StepWork(0, 1, 0)
    now = 0.0
    clock.submitted(now, work)
    for _ in range(MIN_STEPS):
        clock.submitted(now + 0.001, work)
        now += 0.01
        clock.collected(now, is_last=False)
    cost = clock.costs.cost()
    assert cost is not None
    assert seconds(work, cost) == pytest.approx(0.01, rel=1e-3)
