"""Builds families of series, each with the label `replica` last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

Stats = Mapping[str, Any]
Row = tuple[str, str, Stats]  # adapter, replica, the adapter's entry
_Family = GaugeMetricFamily | CounterMetricFamily


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lorafleet_{name}", text, labels=[*labels, "replica"])


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"lorafleet_{name}", text, labels=[*labels, "replica"])


def histogram(name: str, text: str, replicas: Iterable[Stats], key: str) -> HistogramMetricFamily:
    """`key`: in the replica's statistics; a replica that has none has no series."""
    family = HistogramMetricFamily(f"lorafleet_{name}", text, labels=["replica"])
    for stats in replicas:
        add_histogram(family, stats["replica"], stats.get(key))
    return family


def fill(family: _Family, rows: Iterable[Row], key: str) -> _Family:
    """One series an adapter."""
    for adapter, replica, entry in rows:
        if key in entry:
            family.add_metric([adapter, replica], entry[key])
    return family


def fill_by(family: _Family, rows: Iterable[Row], key: str) -> _Family:
    """One series for each name in the entry's dict."""
    for adapter, replica, entry in rows:
        for name, value in sorted(entry.get(key, {}).items()):
            family.add_metric([adapter, name, replica], value)
    return family


def add_histogram(family: HistogramMetricFamily, replica: str, data: Stats | None) -> None:
    if data is None:
        return
    bounds = [*map(str, data["bounds"]), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, data["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric([replica], buckets, data["sum"])
