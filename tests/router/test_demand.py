"""Shares of the traffic, from two windows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from router.demand import WINDOW_S, Demand


def test_shares_are_of_what_was_counted_lately() -> None:
    demand = Demand()
    for i in range(100):
        demand.count("hot" if i % 4 else "cold", now=1.0 + i * 0.01)
    assert demand.share("hot", 2.0) == pytest.approx(0.75)
    assert demand.share("cold", 2.0) == pytest.approx(0.25)
    assert demand.share("never", 2.0) == 0.0


def test_what_stopped_fades_and_is_gone_after_two_windows() -> None:
    demand = Demand()
    shares = []
    for i in range(300):
        now = 0.1 * i
        demand.count("steady", now)
        if now < 10.0:
            demand.count("hot", now)
            demand.count("hot", now)
        shares.append(demand.share("hot", now))
    assert shares[90] == pytest.approx(2 / 3, abs=0.05)
    assert all(later <= before + 1e-9 for before, later in pairwise(shares[100:]))
    assert shares[int((10.0 + 2 * WINDOW_S) * 10) + 1] == 0.0


def test_silence_forgets_everything() -> None:
    demand = Demand()
    demand.count("a", 0.0)
    assert demand.share("a", 100.0) == 0.0
    demand.count("b", 101.0)
    assert demand.share("b", 101.0) == 1.0


def test_names_do_not_pile_up() -> None:
    demand = Demand()
    for i in range(50_000):
        demand.count(f"junk-{i}", i * 0.001)
    assert len(demand._now) + len(demand._last) <= 2 * 4001
