"""Figures of a run: from records to percentiles, goodput and hit ratios. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from load_tests.harness.client import Record

LOOKUPS = "lorafleet_adapter_lookups_total"
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = 6.0  # S-LoRA's
    tpot_s: float = 0.15  # Chameleon's


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run must keep; None: anything goes."""

    max_error_share: float | None = 0.0
    max_ttft_p95_s: float | None = None
    min_good_share: float | None = None
    min_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    requests: int
    errors: dict[str, int]  # by code
    ttft_s: dict[str, float]  # by percentile: p50, p95, p99; answered requests only
    tpot_s: dict[str, float]
    e2e_s: dict[str, float]
    requests_per_s: float  # answered
    output_tokens_per_s: float
    good_share: float  # of all requests: answered within the SLO
    goodput_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    duration_s: float  # until the last answer's end
    groups: dict[str, Group]  # "all", and those of the plan
    hits: dict[str, float]  # lookups by tier while it ran; empty: the server does not tell
    late_p99_s: float  # requests that left after they were due: this machine's fault

    @property
    def hit_ratio(self) -> float | None:
        total = sum(self.hits.values())
        return 1 - self.hits.get("source", 0.0) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "hit_ratio": self.hit_ratio}


def percentile(values: Sequence[float], q: float) -> float:
    """The least value that a part `q` of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def summarise(records: Sequence[Record], slo: Slo, hits: Mapping[str, float] | None = None) -> Summary:
    ends = (end for record in records for end in (record.sent, record.last) if end is not None)
    duration_s = max(ends, default=0.0)
    groups = {"all": list(records)}
    for record in records:
        groups.setdefault(record.group, [])
        if record.group != "all":
            groups[record.group].append(record)
    late = [record.sent - record.planned for record in records]
    return Summary(
        duration_s,
        {name: _group(of, slo, duration_s) for name, of in groups.items()},
        dict(hits or {}),
        percentile(late, 0.99) if late else 0.0,
    )


def is_good(record: Record, slo: Slo) -> bool:
    if record.error is not None or record.ttft_s is None or record.ttft_s > slo.ttft_s:
        return False
    return record.tpot_s is None or record.tpot_s <= slo.tpot_s


def _group(records: Sequence[Record], slo: Slo, duration_s: float) -> Group:
    answered = [record for record in records if record.error is None]
    good = sum(is_good(record, slo) for record in records)
    return Group(
        len(records),
        dict(Counter(record.error for record in records if record.error)),
        _percentiles(record.ttft_s for record in answered),
        _percentiles(record.tpot_s for record in answered),
        _percentiles(record.e2e_s for record in answered),
        len(answered) / duration_s if duration_s else 0.0,
        sum(record.num_output for record in answered) / duration_s if duration_s else 0.0,
        good / len(records) if records else 0.0,
        good / duration_s if duration_s else 0.0,
    )


def _percentiles(values: Iterable[float | None]) -> dict[str, float]:
    present = [value for value in values if value is not None]
    return {f"p{q * 100:g}": percentile(present, q) for q in QUANTILES} if present else {}


def missed(summary: Summary, limits: Limits) -> list[str]:
    """What was not kept, in words."""
    group = summary.groups["all"]
    error_share = sum(group.errors.values()) / max(1, group.requests)
    figures = (
        ("errors", error_share, limits.max_error_share, True),
        ("TTFT p95", group.ttft_s.get("p95", math.inf), limits.max_ttft_p95_s, True),
        ("good requests", group.good_share, limits.min_good_share, False),
        ("hit ratio", summary.hit_ratio or 0.0, limits.min_hit_ratio, False),
    )
    return [
        f"{name}: {value:.4g}, not {'at most' if is_most else 'at least'} {limit:g}"
        for name, value, limit, is_most in figures
        if limit is not None and (value > limit if is_most else value < limit)
    ]


def lookups(metrics: str) -> dict[str, float]:
    """By tier, from the text of a metrics page; empty if it does not count them."""
    samples = itertools.chain.from_iterable(f.samples for f in text_string_to_metric_families(metrics))
    found: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        if sample.name == LOOKUPS:
            found[sample.labels["tier"]] += sample.value
    return dict(found)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Of counters; one that went back was a replica's that is no more."""
    return {name: max(0.0, value - before.get(name, 0.0)) for name, value in after.items()}
