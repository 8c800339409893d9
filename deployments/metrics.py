"""Engine statistics as Prometheus text, merged over replicas. Knows nothing of Ray or HTTP.

`EngineClient.stats()` returns this JSON, cumulative since the engine started; a key that is missing
counts as zero, and the names under "adapters" are names that the engine accepted, never raw client input:

    {"running": 3, "waiting": 1, "max_num_seqs": 32,
     "model": "1f0c...", "preemptions": 0,                      # digest of the base model
     "tokens": {"queued": 700, "running": 4096},                # to be computed, with KV in the pool
     "step_cost": [0.005, 2.4e-5, 3e-5, 1e-6],                  # see engine/step_cost.py; null: unknown
     "steps": 1000,
     "lora_pages": 80,                                          # of adapters that running requests use
     "running_ranks": 48,                                       # of adapters, summed over running requests
     "pages": {"total": 512, "free": 300, "kv": 100, "prefix": 32, "adapters": 80},   # pages by owner
     "page_bytes": 2097152, "page_tokens": 16,
     "slots": {"total": 64, "used": 2},                         # adapter slots
     "host_cache": {"capacity_bytes": 2147483648, "used_bytes": 50331648},
     "evictions": {"hbm": {"pages": 4, "unused": 2, "unloaded": 1}, "host": {"bytes": 1}},  # tier and cause
     "evictions_blocked": {"slot": 3},                          # waits, by what was lacking: slot or pages
     "prefetches": {"hint": {"copied": 3, "used": 3}, "popularity": {...}},  # copied before they were wanted
     "load_seconds": {"bounds": [0.01, 0.1, 1.0], "counts": [1, 5, 2, 0], "sum": 1.7},  # last: above all
     "step_seconds": {...}, "step_adapters": {...},             # histograms too; adapters in a step
     "adapters": {
        "sql": {"digest": "9f3a...", "tier": "hbm",        # hbm | host | loading | source (known, not here)
                "running": 2, "waiting": 1, "pages": 40, "host_bytes": 0, "rank": 16, "pinned": false,
                # once a request: where its adapter was found; a miss: at the source only
                "hits": {"hbm": 90, "host": 4, "disk": 1}, "misses": 1,
                "loads": {"disk": 1, "source": 1}, "load_seconds": {"disk": 0.1, "source": 1.0},
                "load_failures": 0,
                "blocked_seconds_sum": 1.3,                # requests' time spent waiting for its weights
                "evictions": {"pages": 1},                 # from hbm, by cause
                "prompt_tokens": 4096, "cached_tokens": 1024, "output_tokens": 512},
        "_base": {...}}}                                   # the base model: running, waiting and tokens only

A replica adds what it sees itself, see `replica_books.py`: "replica" (its id), "routes" ({reason: requests}),
"stale_misroutes" (requests whose adapter the router wrongly took to be resident here),
"ttft_seconds", "tpot_seconds" and "e2e_seconds" (histograms), "resident" and "awaited" (names of all adapters
that are here or waited for), "num_host" (adapters in host memory only) and, in each adapter's entry,
"ttft_seconds_sum", "ttft_count", "errors" ({code: n}) and "finished" ({reason: n}).
Adapters beyond a bound share one entry; see `label_cap.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain

from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily

from deployments.exposition import text_of
from deployments.metric_families import Row, Stats, counter, fill, fill_by, gauge, histogram
from deployments.vllm_metrics import vllm_families
from engine.stats import BASE

# name, key in the replica's statistics, help
_REPLICA_GAUGES = (
    ("requests_running", "running", "Requests in the running batch."),
    ("requests_waiting", "waiting", "Requests that wait for a seat, pages or their adapter."),
    ("max_running_requests", "max_num_seqs", "Seats of the running batch."),
    (
        "running_ranks",
        "running_ranks",
        "Ranks of the adapters in the running batch, summed over its requests.",
    ),
    ("pool_page_bytes", "page_bytes", "Size of a page."),
)
# name, first and second key in the replica's statistics, help
_NESTED_GAUGES = (
    (
        "queued_tokens",
        "tokens",
        "queued",
        "Tokens that are to be computed yet, but for those to be generated.",
    ),
    ("running_tokens", "tokens", "running", "Tokens with keys and values in the pool, of running requests."),
    ("adapter_slots", "slots", "total", "Adapters that can be resident at once."),
    ("adapter_slots_used", "slots", "used", "Adapters that are resident."),
    ("host_cache_bytes", "host_cache", "used_bytes", "Adapter bytes in host memory."),
    ("host_cache_capacity_bytes", "host_cache", "capacity_bytes", "Host memory for adapters."),
)
_REPLICA_COUNTERS = (
    ("preemptions", "preemptions", "Requests put back because the pool was full."),
    ("steps", "steps", "Steps that computed something."),
    (
        "router_stale_misroutes",
        "stale_misroutes",
        "Requests sent here because their adapter was resident, when it was no more.",
    ),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft_seconds", "From arrival at the replica to the first token."),
    ("time_per_output_token_seconds", "tpot_seconds", "Of a request, after its first token."),
    ("request_duration_seconds", "e2e_seconds", "From arrival at the replica to the last token."),
    ("adapter_load_duration_seconds", "load_seconds", "Loads of adapters into host memory."),
    ("step_duration_seconds", "step_seconds", "Steps that copied no adapter."),
    ("step_adapters", "step_adapters", "Different adapters in a step."),
)
# name, key in the adapter's entry, help
_ADAPTER_GAUGES = (
    ("adapter_requests_running", "running", "Requests in the running batch, by adapter."),
    ("adapter_requests_waiting", "waiting", "Requests that wait, by adapter."),
    ("adapter_pages", "pages", "Pages of the pool that hold the adapter's weights."),
)
_ADAPTER_COUNTERS = (
    ("adapter_load_failures", "load_failures", "Failed loads."),
    ("adapter_blocked_seconds", "blocked_seconds_sum", "Requests' time spent waiting for the weights."),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens."),
    ("cached_prompt_tokens", "cached_tokens", "Prompt tokens found in the prefix cache."),
    ("output_tokens", "output_tokens", "Generated tokens."),
)
# name, key of a dict in the adapter's entry, the label that its keys become, help
_ADAPTER_COUNTERS_BY = (
    ("adapter_loads", "loads", "tier", "Finished loads, by where they read from."),
    ("adapter_load_seconds", "load_seconds", "tier", "Time spent in loads, by where they read from."),
    ("adapter_evictions", "evictions", "cause", "Evictions from device memory."),
    ("requests", "finished", "finish_reason", "Requests that ended."),
    ("request_errors", "errors", "code", "Requests that ended in an error."),
)


def render(replicas: Iterable[Stats], now: float | None = None, num_silent: int = 0) -> str:
    """Prometheus text of all replicas' statistics; the label `replica` tells them apart.

    `num_silent`: replicas that gave none. Without any replica the text says so, and has no series of one.
    """
    told = list(replicas)
    now = time.time() if now is None else now
    return text_of(chain([_fleet_family(len(told), num_silent)], families(told, now)))


def families(replicas: list[Stats], now: float) -> Iterator[Metric]:
    """What a replica tells of itself."""
    return chain(
        _replica_families(replicas),
        _pool_families(replicas),
        _adapter_families(replicas),
        vllm_families(replicas, now),
    )


def _fleet_family(num_answering: int, num_silent: int) -> Metric:
    family = GaugeMetricFamily(
        "lorafleet_replicas", "Replicas by whether they answered this scrape.", labels=["state"]
    )
    family.add_metric(["answers"], num_answering)
    family.add_metric(["silent"], num_silent)
    return family


def _replica_families(replicas: list[Stats]) -> Iterator[Metric]:
    for name, key, text in _REPLICA_GAUGES:
        family = gauge(name, text)
        for stats in replicas:
            family.add_metric([stats["replica"]], stats.get(key, 0))
        yield family
    for name, key, inner, text in _NESTED_GAUGES:
        family = gauge(name, text)
        for stats in replicas:
            family.add_metric([stats["replica"]], stats.get(key, {}).get(inner, 0))
        yield family
    for name, key, text in _REPLICA_COUNTERS:
        total = counter(name, text)
        for stats in replicas:
            total.add_metric([stats["replica"]], stats.get(key, 0))
        yield total
    for name, key, text in _HISTOGRAMS:
        yield histogram(name, text, replicas, key)


def _pool_families(replicas: list[Stats]) -> Iterator[Metric]:
    pages = gauge("pool_pages", "Pages of the pool by owner.", "owner")
    evictions = counter("evictions", "Evictions of adapters by cause.", "tier", "cause")
    blocked = counter(
        "evictions_blocked",
        "Waits of requests because all that could be evicted for them was in use, by what they lacked.",
        "cause",
    )
    prefetches = counter(
        "prefetches", "Adapters copied to the pool before a request asked for them.", "reason"
    )
    used = counter(
        "prefetches_used", "Of these, those that a request asked for while they were there.", "reason"
    )
    routes = counter("router_requests", "Requests by why they were routed here.", "reason")
    for stats in replicas:
        replica = stats["replica"]
        for owner, count in stats.get("pages", {}).items():
            if owner != "total":  # the owners' sum
                pages.add_metric([owner, replica], count)
        for tier, causes in stats.get("evictions", {}).items():
            for cause, count in causes.items():
                evictions.add_metric([tier, cause, replica], count)
        for cause, count in stats.get("evictions_blocked", {}).items():
            blocked.add_metric([cause, replica], count)
        for reason, counts in stats.get("prefetches", {}).items():
            prefetches.add_metric([reason, replica], counts["copied"])
            used.add_metric([reason, replica], counts["used"])
        for reason, count in sorted(stats.get("routes", {}).items()):
            routes.add_metric([reason, replica], count)
    yield from (pages, evictions, blocked, prefetches, used, routes)


def _adapter_families(replicas: list[Stats]) -> Iterator[Metric]:
    rows = [(name, s["replica"], entry) for s in replicas for name, entry in s.get("adapters", {}).items()]
    for name, key, text in _ADAPTER_GAUGES:
        yield fill(gauge(name, text, "adapter"), rows, key)
    for name, key, text in _ADAPTER_COUNTERS:
        yield fill(counter(name, text, "adapter"), rows, key)
    for name, key, label, text in _ADAPTER_COUNTERS_BY:
        yield fill_by(counter(name, text, "adapter", label), rows, key)
    yield from _residency_families(rows, {s["replica"]: s.get("page_bytes", 0) for s in replicas})
    ttft = SummaryMetricFamily(
        "lorafleet_adapter_time_to_first_token_seconds",
        "From arrival at the replica to the first token, by adapter.",
        labels=["adapter", "replica"],
    )
    for adapter, replica, entry in rows:
        ttft.add_metric([adapter, replica], entry.get("ttft_count", 0), entry.get("ttft_seconds_sum", 0.0))
    yield ttft


def _residency_families(rows: list[Row], page_bytes: dict[str, int]) -> Iterator[Metric]:
    loaded = gauge("adapter_loaded", "1 where the adapter's weights are.", "adapter", "tier")
    nbytes = gauge("adapter_resident_bytes", "Memory that the adapter's weights take.", "adapter", "tier")
    lookups = counter(
        "adapter_lookups", "Requests by where their adapter was found; a hit is any tier but source.",
        "adapter", "tier",
    )  # fmt: skip
    for adapter, replica, entry in rows:
        if entry.get("tier") in ("hbm", "host"):
            loaded.add_metric([adapter, entry["tier"], replica], 1)
        if adapter == BASE:
            continue
        for tier, size in (
            ("hbm", entry.get("pages", 0) * page_bytes[replica]),
            ("host", entry.get("host_bytes", 0)),
        ):
            if size:
                nbytes.add_metric([adapter, tier, replica], size)
        if "hits" in entry:
            for tier, count in {**entry["hits"], "source": entry["misses"]}.items():
                lookups.add_metric([adapter, tier, replica], count)
    yield from (loaded, nbytes, lookups)
