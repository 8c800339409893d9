"""Simulated routers with turns: nobody is lost, and hints hide loads behind the wait for a place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.simulator import Failure
from router.simulator_traffic import poisson, zipf
from router.simulator_turns import TurnsFleet
from tests.router.test_simulator import LENGTHS, SETUP, SPEC

SMALL = replace(SETUP, num_replicas=3, num_routers=2, spec=replace(SPEC, seats=2))
RATE = 8.0  # about twice what three replicas of two seats serve


def served(with_hints: bool, seed: int, setup: object = SMALL) -> TurnsFleet:
    fleet = TurnsFleet(SMALL if setup is SMALL else setup, seed, with_hints)  # type: ignore[arg-type]
    fleet.run(poisson(lambda _: RATE, 20.0, zipf(100), LENGTHS, seed))
    return fleet


@pytest.mark.parametrize("seed", range(3))
def test_hints_spare_who_waited_its_load_and_cost_no_more_of_them(seed: int) -> None:
    without, hinted = served(False, seed), served(True, seed)
    cold = [sum(r.is_cold for r in fleet.done if r.num_retries) for fleet in (without, hinted)]
    assert cold[1] < 0.6 * cold[0]
    loads = [sum(r.num_loads for r in fleet._replicas.values()) for fleet in (without, hinted)]
    assert loads[1] <= 1.1 * loads[0]
    assert without.num_hints == 0 < hinted.num_hints


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_while_replicas_die(seed: int) -> None:
    failing = replace(SMALL, failures=(Failure(3.0, (0, 1, 2), 2.0), Failure(9.0, (1,), 2.0)))
    fleet = served(True, seed, failing)
    assert len(set(fleet.done) | set(fleet.lost)) == len(fleet.done) + len(fleet.lost)
    assert fleet._num_open == 0
    assert not any(router.turns for router in fleet._routers)
    for router in fleet._routers:
        router.rule.table.check_invariants()
