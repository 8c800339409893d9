"""Engine statistics as Prometheus text, merged over replicas. Knows nothing of Ray or HTTP.

`EngineClient.stats()` returns this JSON, cumulative since the engine started; a key that is missing
counts as zero, and the names under "adapters" are names that the engine accepted, never raw client input:

    {"running": 3, "waiting": 1, "max_num_seqs": 32,
     "model": "1f0c...", "preemptions": 0,                              # digest of the base model
     "tokens": {"queued": 700, "running": 4096},                        # to be computed, with KV in the pool
     "step_cost": [0.005, 2.4e-5, 3e-5, 1e-6],                          # see engine/step_cost.py; null: unknown
     "lora_pages": 80,                                                  # of adapters that running requests use
     "pages": {"total": 512, "free": 300, "kv": 100, "prefix": 32, "adapters": 80},   # pages by owner
     "page_bytes": 2097152,
     "slots": {"total": 64, "used": 2},                                 # adapter slots
     "host_cache": {"capacity_bytes": 2147483648, "used_bytes": 50331648},
     "evictions": {"hbm": {"pages": 4, "slot": 0, "unloaded": 1}, "host": {"bytes": 1}},  # by tier and cause
     "load_seconds": {"bounds": [0.01, 0.1, 1.0], "counts": [1, 5, 2, 0], "sum": 1.7},  # last: above all
     "adapters": {
        "sql": {"digest": "9f3a...", "tier": "hbm",        # hbm | host | loading | source (known, not here)
                "running": 2, "waiting": 1, "pages": 40, "pinned": false,
                "hits": {"hbm": 90, "host": 4}, "misses": 1,  # once a request: where its adapter was found
                "loads": 2, "load_failures": 0, "load_seconds_sum": 1.1,
                "blocked_seconds_sum": 1.3,                # requests' time spent waiting for its weights
                "evictions": 1,                            # from hbm
                "prompt_tokens": 4096, "cached_tokens": 1024, "output_tokens": 512},
        "_base": {...}}}                                   # the base model: running, waiting and tokens only

A replica adds what it sees itself: "replica" (its id), "routes" ({reason: requests}) and, in each adapter's
entry, "ttft_seconds_sum", "ttft_count" and "errors" ({code: n}), "ttft_seconds", a histogram, and
"resident" and "awaited", the names of all adapters that are here or waited for; see `replica_books.py`.
Adapters beyond a bound share one entry; see `label_cap.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from engine.stats import BASE

Stats = Mapping[str, Any]

# name, key in the replica's statistics, help
_REPLICA_GAUGES = (
    ("requests_running", "running", "Requests in the running batch."),
    ("requests_waiting", "waiting", "Requests that wait for a seat, pages or their adapter."),
)
# name, key in the adapter's entry, help
_ADAPTER_GAUGES = (
    ("adapter_requests_running", "running", "Requests in the running batch, by adapter."),
    ("adapter_requests_waiting", "waiting", "Requests that wait, by adapter."),
    ("adapter_pages", "pages", "Pages of the pool that hold the adapter's weights."),
)
_ADAPTER_COUNTERS = (
    ("adapter_loads", "loads", "Finished loads from the source."),
    ("adapter_load_failures", "load_failures", "Failed loads from the source."),
    ("adapter_load_seconds", "load_seconds_sum", "Time spent in loads from the source."),
    ("adapter_blocked_seconds", "blocked_seconds_sum", "Requests' time spent waiting for the weights."),
    ("adapter_evictions", "evictions", "Evictions from device memory."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens."),
    ("cached_prompt_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("output_tokens", "output_tokens", "Generated tokens."),
)


def render(replicas: Iterable[Stats], now: float | None = None) -> str:
    """Prometheus text of all replicas' statistics; the label `replica` tells them apart."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(replicas), time.time() if now is None else now))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, replicas: list[Stats], now: float) -> None:
        self._replicas = replicas
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield from _replica_families(self._replicas)
        yield from _pool_families(self._replicas)
        yield from _adapter_families(self._replicas)
        yield _lora_requests_info(self._replicas, self._now)


def _replica_families(replicas: list[Stats]) -> Iterator[Metric]:
    for name, key, text in _REPLICA_GAUGES:
        gauge = _gauge(name, text, "replica")
        for stats in replicas:
            gauge.add_metric([stats["replica"]], stats.get(key, 0))
        yield gauge
    preemptions = _counter("preemptions", "Requests put back because the pool was full.", "replica")
    routes = _counter("router_requests", "Requests by why they were routed here.", "reason", "replica")
    ttft = _histogram("time_to_first_token_seconds", "From arrival at the replica to the first token.")
    loads = _histogram("adapter_load_duration_seconds", "Loads of adapters from the source.")
    for stats in replicas:
        preemptions.add_metric([stats["replica"]], stats.get("preemptions", 0))
        for reason, count in sorted(stats.get("routes", {}).items()):
            routes.add_metric([reason, stats["replica"]], count)
        _add_histogram(ttft, stats["replica"], stats.get("ttft_seconds"))
        _add_histogram(loads, stats["replica"], stats.get("load_seconds"))
    yield from (preemptions, routes, ttft, loads)


def _pool_families(replicas: list[Stats]) -> Iterator[Metric]:
    pages = _gauge("pool_pages", "Pages of the pool by owner.", "owner", "replica")
    page_bytes = _gauge("pool_page_bytes", "Size of a page.", "replica")
    slots = _gauge("adapter_slots", "Adapters that can be resident at once.", "replica")
    slots_used = _gauge("adapter_slots_used", "Adapters that are resident.", "replica")
    host_bytes = _gauge("host_cache_bytes", "Adapter bytes in host memory.", "replica")
    host_capacity = _gauge("host_cache_capacity_bytes", "Host memory for adapters.", "replica")
    evictions = _counter("evictions", "Evictions of adapters by cause.", "tier", "cause", "replica")
    for stats in replicas:
        replica = stats["replica"]
        for owner, count in stats.get("pages", {}).items():
            if owner != "total":  # the owners' sum
                pages.add_metric([owner, replica], count)
        page_bytes.add_metric([replica], stats.get("page_bytes", 0))
        slots.add_metric([replica], stats.get("slots", {}).get("total", 0))
        slots_used.add_metric([replica], stats.get("slots", {}).get("used", 0))
        host_bytes.add_metric([replica], stats.get("host_cache", {}).get("used_bytes", 0))
        host_capacity.add_metric([replica], stats.get("host_cache", {}).get("capacity_bytes", 0))
        for tier, causes in stats.get("evictions", {}).items():
            for cause, count in causes.items():
                evictions.add_metric([tier, cause, replica], count)
    yield from (pages, page_bytes, slots, slots_used, host_bytes, host_capacity, evictions)


def _adapter_families(replicas: list[Stats]) -> Iterator[Metric]:
    rows = [(name, s["replica"], entry) for s in replicas for name, entry in s.get("adapters", {}).items()]
    for name, key, text in _ADAPTER_GAUGES:
        yield _fill(_gauge(name, text, "adapter", "replica"), rows, key)
    for name, key, text in _ADAPTER_COUNTERS:
        yield _fill(_counter(name, text, "adapter", "replica"), rows, key)
    loaded = _gauge("adapter_loaded", "1 where the adapter's weights are.", "adapter", "tier", "replica")
    lookups = _counter(
        "adapter_lookups", "Requests by where their adapter was found.", "adapter", "tier", "replica"
    )
    errors = _counter("request_errors", "Requests that ended in an error.", "adapter", "code", "replica")
    ttft = SummaryMetricFamily(
        "lorafleet_adapter_time_to_first_token_seconds",
        "From arrival at the replica to the first token, by adapter.",
        labels=["adapter", "replica"],
    )
    for adapter, replica, entry in rows:
        if entry.get("tier") in ("hbm", "host"):
            loaded.add_metric([adapter, entry["tier"], replica], 1)
        if "hits" in entry and adapter != BASE:
            hits = entry["hits"]
            for tier, count in ("hbm", hits["hbm"]), ("host", hits["host"]), ("source", entry["misses"]):
                lookups.add_metric([adapter, tier, replica], count)
        for code, count in entry.get("errors", {}).items():
            errors.add_metric([adapter, code, replica], count)
        ttft.add_metric([adapter, replica], entry.get("ttft_count", 0), entry.get("ttft_seconds_sum", 0.0))
    yield from (loaded, lookups, errors, ttft)


def _lora_requests_info(replicas: list[Stats], now: float) -> Metric:
    """Gateways read this one from each replica: lists in labels, the time as the value.

    "Running" is what can be served at once, in use or not: else an idle adapter would look absent and its
    next request would go to a cold replica.
    """
    labels = ["running_lora_adapters", "waiting_lora_adapters", "max_lora", "replica"]
    gauge = GaugeMetricFamily("vllm:lora_requests_info", "Adapters on this replica.", labels=labels)
    for stats in replicas:
        resident, waiting = (",".join(stats.get(key, ())) for key in ("resident", "awaited"))
        slots = str(stats.get("slots", {}).get("total", 0))
        gauge.add_metric([resident, waiting, slots, stats["replica"]], now)
    return gauge


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lorafleet_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"lorafleet_{name}", text, labels=labels)


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"lorafleet_{name}", text, labels=["replica"])


_Family = GaugeMetricFamily | CounterMetricFamily


def _fill(family: _Family, rows: list[tuple[str, str, Stats]], key: str) -> _Family:
    for adapter, replica, entry in rows:
        if key in entry:
            family.add_metric([adapter, replica], entry[key])
    return family


def _add_histogram(family: HistogramMetricFamily, replica: str, data: Stats | None) -> None:
    if data is None:
        return
    bounds = [*map(str, data["bounds"]), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, data["counts"], strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric([replica], buckets, data["sum"])
