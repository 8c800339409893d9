"""Keeps the number of adapters that metrics name within a bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER = "_other"
DEFAULT_MAX_NAMES = 200


class LabelCap:
    """The first `max_names` adapters keep their own entry for as long as they exist; the rest share OTHER.

    First come, not hottest: a name that came and went between the two would look like counter resets.
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._named: set[str] = set()

    def fold(self, entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Entries of an engine's statistics, by adapter."""
        self._named.intersection_update(entries)
        for name in entries:
            if len(self._named) == self._max_names:
                break
            self._named.add(name)
        folded = {name: entry for name, entry in entries.items() if name in self._named}
        rest = [entry for name, entry in entries.items() if name not in self._named]
        if rest:
            folded[OTHER] = _sum(rest)
        return folded


def _sum(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds up numbers, also those one level down. What cannot be added (digest, tier) is left out."""
    total: dict[str, Any] = {}
    for entry in entries:
        for key, value in entry.items():
            if isinstance(value, dict):
                total[key] = _sum([total.get(key, {}), value])
            elif isinstance(value, int | float) and not isinstance(value, bool):
                total[key] = total.get(key, 0) + value
    return total
