"""Our text of families is the client library's."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from deployments.exposition import text_of
from deployments.metrics import families
from tests.deployments.test_metrics import adapter, replica

STRANGE = ('a"b', "a\\b", "a\nb", "naïve 🦊", "", "{}=,")
NUMBERS = (0, 1, 1.5, 1e-9, 1e21, -2.0, float("inf"), float("nan"))


class Collector:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def by_the_library(metrics: list[Metric]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(metrics))
    return generate_latest(registry).decode()


def test_strange_labels_and_numbers_are_written_as_the_library_does() -> None:
    gauge = GaugeMetricFamily("g", 'Help with \\ and "quotes"\nand a line.', labels=["z", "a"])
    counter = CounterMetricFamily("c", "Counts.", labels=["x"])
    for text in STRANGE:
        gauge.add_metric([text, "second"], 1)
        counter.add_metric([text], 2)
    numbers = GaugeMetricFamily("n", "Numbers.", labels=["x"])
    for index, number in enumerate(NUMBERS):
        numbers.add_metric([str(index)], number)
    histogram = HistogramMetricFamily("h", "Buckets.", labels=["r"])
    histogram.add_metric(["r1"], [("0.1", 1), ("+Inf", 3)], 5.0)
    summary = SummaryMetricFamily("s", "Sums.", labels=["r"])
    summary.add_metric(["r1"], 3, 1.5)
    metrics = [gauge, counter, numbers, histogram, summary, GaugeMetricFamily("none", "Empty.")]
    assert text_of(metrics) == by_the_library(metrics)


def test_a_replicas_page_is_the_librarys() -> None:
    stats = replica(
        routes={"home": 1},
        resident=["A"],
        load_seconds={"bounds": [0.1], "counts": [1, 2], "sum": 5.0},
        adapters={'odd"name': adapter(errors={"overloaded": 1}, ttft_seconds_sum=1.5, ttft_count=2)},
    )
    metrics = list(families([stats], 1000.0))
    assert text_of(metrics) == by_the_library(metrics)
