"""Names that are not desired any more, until the replicas have forgotten them. Pure: time comes in as `now`.

Not at once: a listing misses an adapter whose files are just being replaced.
"""

from __future__ import annotations

from collections.abc import Set

GONE_S = 60.0


class Departures:
    def __init__(self) -> None:
        self._names: Set[str] = frozenset()  # that are desired
        self._gone: dict[str, float] = {}  # name -> since when, oldest first

    def see(self, names: Set[str], now: float) -> None:
        """All that are desired now."""
        for name in names & self._gone.keys():
            del self._gone[name]
        self._gone.update(dict.fromkeys(sorted(self._names - names), now))
        self._names = names

    def due(self, now: float) -> list[str]:
        """Gone for so long that they will not come back by themselves."""
        return [name for name, since in self._gone.items() if now - since >= GONE_S]

    def forgotten(self, name: str) -> None:
        """By the replicas."""
        self._gone.pop(name, None)
