from __future__ import annotations

import time

import pytest

from engine.stopwatch import Stopwatch


def test_parts_that_come_again_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = Stopwatch()
    for name, seconds in (("read", 2.0), ("compile", 1.5), ("read", 4.0)):
        with watch.part(name):
            now += seconds
    now += 1.0  # of no part
    assert str(watch) == "8.5 s (read 6.0, compile 1.5)"
