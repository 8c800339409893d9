"""Adapters take turns."""

from __future__ import annotations

import random
from collections import Counter

from router.turns import Turns


def drain(turns: Turns[str]) -> list[str]:
    return [turns.next() for _ in range(len(turns))]


def test_one_adapter_in_order_of_arrival() -> None:
    turns: Turns[str] = Turns()
    for item in "abc":
        turns.add("sql", item)
    assert drain(turns) == ["a", "b", "c"]


def test_one_that_asks_for_much_waits_behind_itself() -> None:
    """FR-32."""
    turns: Turns[str] = Turns()
    for i in range(100):
        turns.add("noisy", f"noisy {i}")
    for name in ("x", "y"):
        turns.add(name, name)
    assert drain(turns)[:5] == ["noisy 0", "x", "y", "noisy 1", "noisy 2"]


def test_who_comes_later_waits_for_one_round_at_most() -> None:
    turns: Turns[str] = Turns()
    for name in "abc":
        for i in range(10):
            turns.add(name, f"{name}{i}")
    turns.next()
    turns.add("late", "late")
    assert drain(turns).index("late") <= 3


def test_who_gave_up_is_passed_over() -> None:
    turns: Turns[str] = Turns()
    for item in ("a0", "a1"):
        turns.add("a", item)
    turns.add("b", "b0")
    turns.discard("a", "a0")
    turns.discard("a", "a0")
    turns.discard("nobody", "x")
    assert len(turns) == 2
    assert drain(turns) == ["a1", "b0"]


def test_nobody_is_lost_or_served_twice() -> None:
    rng = random.Random(0)
    turns: Turns[str] = Turns()
    waiting: dict[str, str] = {}
    ends: Counter[str] = Counter()
    for i in range(5000):
        choice = rng.random()
        if choice < 0.5:
            adapter = f"a{rng.randrange(7)}"
            turns.add(adapter, f"r{i}")
            waiting[f"r{i}"] = adapter
        elif choice < 0.7 and waiting:
            item = rng.choice(sorted(waiting))
            turns.discard(waiting.pop(item), item)
            ends[item] += 1
        elif turns:
            item = turns.next()
            del waiting[item]
            ends[item] += 1
        assert len(turns) == len(waiting)
    for item in drain(turns):
        ends[item] += 1
    assert set(ends.values()) == {1}
