"""Plans are what their names say, and the same each time."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest

from load_tests.harness.workload import (
    PRESETS,
    SHIFT_S,
    TOKEN_IDS,
    Preset,
    arrivals,
    plan,
    popularity,
    trace,
)

N, DRAWS = 100, 20_000


def shares(name: str, exponent: float = 1.0, now: float = 0.0, n: int = N) -> list[float]:
    """By adapter."""
    pick = popularity(name, n, random.Random(0), exponent)
    counts = Counter(pick(now) for _ in range(DRAWS))
    assert set(counts) <= set(range(n))
    return [counts[i] / DRAWS for i in range(n)]


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gaps_have_their_mean_and_deviation(cv: float) -> None:
    times = list(arrivals(10.0, 2000.0, cv, random.Random(0)))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)
    assert max(times) < 2000.0


def test_a_trace_is_stretched_over_the_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([30, 10, 20]))
    assert list(trace(path, 100.0)) == [0.0, 50.0, 100.0]
    path.write_text("[7, 7]")
    with pytest.raises(ValueError, match="no two different times"):
        trace(path, 100.0)


def test_zipf_power_and_skewed_have_their_shares() -> None:
    weights = [(i + 1) ** -1.2 for i in range(N)]
    assert shares("zipf", 1.2)[0] == pytest.approx(weights[0] / sum(weights), rel=0.05)
    # the first k of n have (k / n) to the power of the exponent
    assert sum(shares("power", 0.3)[:25]) == pytest.approx(0.25**0.3, rel=0.05)
    assert sum(shares("power", 1.0)[:25]) == pytest.approx(0.25, rel=0.05)
    skewed = shares("skewed")
    assert skewed[0] / skewed[1] == pytest.approx(1.5, rel=0.1)


def test_distinct_identical_and_uniform() -> None:
    assert shares("identical")[0] == 1.0
    assert set(shares("distinct")) == {1 / N}
    assert sum(share > 0 for share in shares("uniform")) == math.ceil(math.sqrt(N))


def test_the_hot_set_moves_on() -> None:
    early, late = shares("shifting"), shares("shifting", now=SHIFT_S * 1.5)
    assert sum(early[:10]) == pytest.approx(0.91, abs=0.02)
    assert sum(late[10:20]) == pytest.approx(0.91, abs=0.02)
    assert sum(late[:10]) < 0.05


def test_an_unknown_popularity_is_refused() -> None:
    with pytest.raises(ValueError, match="no popularity"):
        popularity("loud", 3, random.Random(0))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_plan_the_same_twice_and_within_bounds(name: str) -> None:
    plans = []
    for _ in range(2):
        rng = random.Random(1)
        plans.append(plan(PRESETS[name], arrivals(5.0, 20.0, PRESETS[name].cv, rng), 30, rng, 0.1))
    assert plans[0] == plans[1]
    assert plans[0]
    for request in plans[0]:
        assert 0 <= request.adapter < 30
        assert request.num_output >= 1
        assert request.prompt
        assert set(request.prompt) <= set(TOKEN_IDS)


def test_an_adapters_requests_share_their_beginning_and_no_others() -> None:
    preset = Preset("distinct", lambda rng: (30, 5), shared=1 / 3)
    first, second, again = plan(preset, iter([0.0, 1.0, 2.0]), 2, random.Random(0))
    assert first.prompt[:10] == again.prompt[:10] != second.prompt[:10]
    assert first.prompt[10:] != again.prompt[10:]


def test_groups_are_numbered_behind_each_other() -> None:
    requests = plan(
        Preset("distinct", lambda rng: (3, 5)),
        iter([0.0, 1.0]),
        2,
        random.Random(0),
        group="g",
        first_adapter=7,
    )
    assert [(request.adapter, request.group) for request in requests] == [(7, "g"), (8, "g")]
