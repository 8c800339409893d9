"""What one replica knows of its own requests, and what it tells the router. Pure: time comes in as `now`.

The engine counts tokens, pages and loads; this counts what only the replica sees: why requests were routed
here, how long they waited for their first token, how they ended, and when each adapter was last in use.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

from deployments.label_cap import LabelCap
from engine.stats import BASE

# an adapter that nobody has asked for lately can give its slot to another one
UNUSED_AFTER_S = 10.0
TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_json(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass(slots=True)
class AdapterBook:
    in_flight: int = 0
    last_used: float = 0.0
    ttft_seconds_sum: float = 0.0
    ttft_count: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class ReplicaBooks:
    def __init__(self, max_names: int = 100) -> None:
        self._cap = LabelCap(max_names)
        self._adapters: dict[str, AdapterBook] = {}
        self._routes: dict[str, int] = {}
        self._ttft = Histogram(TTFT_BOUNDS_S)

    def arrived(self, adapter: str, route: str, now: float) -> None:
        book = self._adapters.setdefault(adapter, AdapterBook())
        book.in_flight += 1
        book.last_used = now
        self._routes[route] = self._routes.get(route, 0) + 1

    def first_token(self, adapter: str, waited_s: float) -> None:
        book = self._adapters[adapter]
        book.ttft_seconds_sum += waited_s
        book.ttft_count += 1
        self._ttft.observe(waited_s)

    def ended(self, adapter: str, now: float, error: str | None) -> None:
        """`error` is the code of the error that ended it, if one did."""
        book = self._adapters[adapter]
        book.in_flight -= 1
        book.last_used = now
        if error is not None:
            book.errors[error] = book.errors.get(error, 0) + 1

    def forget(self, adapter: str) -> None:
        """It was unloaded: its series end."""
        book = self._adapters.get(adapter)
        if book is not None and book.in_flight == 0:
            del self._adapters[adapter]

    def in_use(self) -> set[str]:
        return {name for name, book in self._adapters.items() if book.in_flight} - {BASE}

    def is_unused(self, adapter: str, now: float) -> bool:
        book = self._adapters.get(adapter)
        return book is None or (book.in_flight == 0 and now - book.last_used > UNUSED_AFTER_S)

    def merge_into(self, stats: dict[str, Any]) -> dict[str, Any]:
        """The engine's statistics with ours beside them. `stats` stays as it is."""
        adapters = {name: dict(entry) for name, entry in stats.get("adapters", {}).items()}
        tiers = {name: entry["tier"] for name, entry in adapters.items() if entry.get("tier")}
        for name, book in self._adapters.items():
            adapters.setdefault(name, {}).update(
                ttft_seconds_sum=book.ttft_seconds_sum, ttft_count=book.ttft_count, errors=dict(book.errors)
            )
        return {
            **stats,
            "adapters": self._cap.fold(adapters),
            "resident": sorted(name for name, tier in tiers.items() if tier == "hbm"),
            "awaited": sorted(n for n, tier in tiers.items() if tier != "hbm" and adapters[n].get("waiting")),
            "routes": dict(self._routes),
            "ttft_seconds": self._ttft.to_json(),
        }


def routing_stats(stats: dict[str, Any], books: ReplicaBooks, now: float) -> dict[str, Any]:
    """What the router needs: small, sorted and coarse, because any change goes to every router."""
    tiers = {name: entry.get("tier") for name, entry in stats.get("adapters", {}).items()}
    resident = sorted(name for name, tier in tiers.items() if tier == "hbm")
    # whatever is asked for and not there is on its way
    loading = sorted((books.in_use() | {n for n, tier in tiers.items() if tier == "loading"}) - {*resident})
    grain = max(1, stats.get("max_num_seqs", 1) // 8)
    return {
        "resident": resident,
        "loading": loading,
        "host": sorted(name for name, tier in tiers.items() if tier == "host" and name not in loading),
        "running": _round_up(stats.get("running", 0), grain),
        "waiting": _round_up(stats.get("waiting", 0), grain),
        "free_slots": _free_slots(stats, resident, books, now) - len(loading),
    }


def _free_slots(stats: dict[str, Any], resident: list[str], books: ReplicaBooks, now: float) -> int:
    """Adapters that fit without taking a slot, or pages, from one that is in use."""
    slots, pages, adapters = stats.get("slots", {}), stats.get("pages", {}), stats.get("adapters", {})
    unused = sum(books.is_unused(name, now) and not adapters[name].get("pinned") for name in resident)
    free = slots.get("total", 1) - slots.get("used", 0)
    if resident and pages:
        size = max(1, pages["adapters"] // len(resident))
        free = min(free, (pages["free"] + pages["prefix"]) // size)
    return int(free + unused)


def _round_up(value: int, grain: int) -> int:
    return -(-value // grain) * grain
