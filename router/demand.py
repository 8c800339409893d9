"""How much of the traffic asks for which adapter, in the last few seconds. Pure."""

from __future__ import annotations

from collections import defaultdict

WINDOW_S = 4.0


class Demand:
    """Two windows of counts: as the current one fills, the last one fades. Old names go by themselves."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._began = 0.0
        self._now: defaultdict[str, int] = defaultdict(int)
        self._last: defaultdict[str, int] = defaultdict(int)
        self._total_now = 0
        self._total_last = 0

    def count(self, name: str, now: float) -> None:
        self._turn(now)
        self._now[name] += 1
        self._total_now += 1

    def share(self, name: str, now: float) -> float:
        """Of all that was counted, 0 to 1."""
        self._turn(now)
        fading = self._fading(now)
        total = self._total_now + fading * self._total_last
        if not total:
            return 0.0
        return (self._now.get(name, 0) + fading * self._last.get(name, 0)) / total

    def _fading(self, now: float) -> float:
        return max(0.0, 1.0 - (now - self._began) / self._window_s)

    def _turn(self, now: float) -> None:
        age = now - self._began
        if age < self._window_s:
            return
        is_next = age < 2 * self._window_s
        self._last, self._now = (self._now if is_next else defaultdict(int)), defaultdict(int)
        self._total_last, self._total_now = (self._total_now if is_next else 0), 0
        self._began = self._began + self._window_s if is_next else now
