"""Counters of one engine, per adapter and in all; `to_dict` is what metrics and routing read.

Adapters are counted under names that were loaded successfully at least once, so a client cannot add any.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BASE = "_base"
LOAD_SECONDS_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
STEP_SECONDS_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
STEP_ADAPTERS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(slots=True)
class AdapterStats:
    hbm_hits: int = 0  # once a request: where its adapter was when it arrived
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    rank: int = 0  # of the newest version
    loads: int = 0  # from the source
    disk_loads: int = 0
    load_failures: int = 0
    load_seconds_sum: float = 0.0
    disk_load_seconds_sum: float = 0.0
    blocked_seconds_sum: float = 0.0  # requests' time between arrival and the end of the load
    evictions: Counter[str] = field(default_factory=Counter)  # from hbm, by cause
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def on_load(self, seconds: float, is_from_disk: bool) -> None:
        if is_from_disk:
            self.disk_loads += 1
            self.disk_load_seconds_sum += seconds
        else:
            self.loads += 1
            self.load_seconds_sum += seconds

    def on_wait(self, seconds: float, is_from_disk: bool) -> None:
        """A request came when the adapter was in neither memory; `seconds` until it was."""
        if is_from_disk:
            self.disk_hits += 1
        else:
            self.misses += 1
        self.blocked_seconds_sum += seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "hits": {"hbm": self.hbm_hits, "host": self.host_hits, "disk": self.disk_hits},
            "misses": self.misses,
            "rank": self.rank,
            "loads": {"disk": self.disk_loads, "source": self.loads},
            "load_failures": self.load_failures,
            "load_seconds": {"disk": self.disk_load_seconds_sum, "source": self.load_seconds_sum},
            "blocked_seconds_sum": self.blocked_seconds_sum,
            "evictions": dict(self.evictions),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass(slots=True)
class EngineStats:
    adapters: dict[str, AdapterStats] = field(default_factory=lambda: {BASE: AdapterStats()})
    load_seconds: Histogram = field(default_factory=lambda: Histogram(LOAD_SECONDS_BOUNDS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS_BOUNDS))
    step_adapters: Histogram = field(default_factory=lambda: Histogram(STEP_ADAPTERS_BOUNDS))
    hbm_evictions: Counter[str] = field(default_factory=Counter)  # by cause
    preemptions: int = 0
    steps: int = 0
    touched: set[str] = field(default_factory=lambda: {BASE})  # adapters that changed since they were told

    def adapter(self, name: str | None) -> AdapterStats:
        """To be changed."""
        name = name or BASE
        self.touched.add(name)
        stats = self.adapters.get(name)
        if stats is None:
            stats = self.adapters[name] = AdapterStats()
        return stats
