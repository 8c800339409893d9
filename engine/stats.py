"""Counters of one engine, per adapter and in all; `to_dict` is what metrics and routing read.

Adapters are counted under names that were loaded successfully at least once, so a client cannot add any.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BASE = "_base"
LOAD_SECONDS_BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


@dataclass(slots=True)
class AdapterStats:
    hbm_hits: int = 0  # once a request: where its adapter was when it arrived
    host_hits: int = 0
    misses: int = 0
    loads: int = 0
    load_failures: int = 0
    load_seconds_sum: float = 0.0
    blocked_seconds_sum: float = 0.0  # requests' time between arrival and the end of the load
    evictions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "hits": {"hbm": self.hbm_hits, "host": self.host_hits},
            "misses": self.misses,
            "loads": self.loads,
            "load_failures": self.load_failures,
            "load_seconds_sum": self.load_seconds_sum,
            "blocked_seconds_sum": self.blocked_seconds_sum,
            "evictions": self.evictions,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }


@dataclass(slots=True)
class LoadSeconds:
    """Histogram; the last count is above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LOAD_SECONDS_BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(LOAD_SECONDS_BOUNDS, seconds)] += 1
        self.sum += seconds

    def to_dict(self) -> dict[str, Any]:
        return {"bounds": list(LOAD_SECONDS_BOUNDS), "counts": list(self.counts), "sum": self.sum}


@dataclass(slots=True)
class EngineStats:
    adapters: dict[str, AdapterStats] = field(default_factory=lambda: {BASE: AdapterStats()})
    load_seconds: LoadSeconds = field(default_factory=LoadSeconds)
    hbm_evictions: Counter[str] = field(default_factory=Counter)  # by cause
    preemptions: int = 0
    steps: int = 0

    def adapter(self, name: str | None) -> AdapterStats:
        return self.adapters.setdefault(name or BASE, AdapterStats())
