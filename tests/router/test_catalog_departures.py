"""What is gone for good is told once, and what comes back in time never."""

from __future__ import annotations

from router.catalog_departures import GONE_S, Departures


def test_a_name_is_due_when_it_was_gone_for_long() -> None:
    departures = Departures()
    departures.see({"a", "b", "c"}, 0.0)
    departures.see({"b"}, 10.0)
    departures.see({"b"}, 20.0)
    assert departures.due(10.0 + GONE_S - 1) == []
    assert departures.due(10.0 + GONE_S) == ["a", "c"]
    departures.forgotten("a")
    departures.see(set(), 30.0)
    assert departures.due(30.0 + GONE_S) == ["c", "b"]


def test_a_name_that_comes_back_is_not_gone() -> None:
    departures = Departures()
    departures.see({"a"}, 0.0)
    departures.see(set(), 1.0)
    departures.see({"a"}, 2.0)
    assert departures.due(2.0 + GONE_S) == []
    departures.see(set(), 100.0)
    assert departures.due(99.0 + GONE_S) == []
    assert departures.due(100.0 + GONE_S) == ["a"]


def test_names_that_were_never_desired_are_nothing() -> None:
    departures = Departures()
    departures.forgotten("x")
    departures.see(set(), 0.0)
    assert departures.due(GONE_S) == []
