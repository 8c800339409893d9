"""Series under vLLM's names, so that gateways which pick a replica by them work unchanged. Knows no HTTP.

The last four families are names that are only proposed upstream; they change here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from deployments.metric_families import Stats, add_histogram

_LEVELS = {"hbm": "gpu", "host": "cpu"}


def vllm_families(replicas: list[Stats], now: float) -> Iterator[Metric]:
    running = _gauge("num_requests_running", "Requests in the running batch.")
    waiting = _gauge("num_requests_waiting", "Requests that wait.")
    usage = _gauge("kv_cache_usage_perc", "Share of the pool that running requests hold, 0 to 1.")
    config = _gauge("cache_config_info", "The pool.", "block_size", "num_gpu_blocks")
    on_gpu = _gauge("num_gpu_loaded_lora_adapters", "Adapters in device memory.")
    on_cpu = _gauge("num_cpu_loaded_lora_adapters", "Adapters in host memory only.")
    most = _gauge("max_gpu_lora_adapters", "Adapters that device memory can hold at once.")
    loads = HistogramMetricFamily(
        "vllm:lora_adapter_load_seconds", "Loads of adapters into host memory.", labels=["replica"]
    )
    for stats in replicas:
        labels = [stats["replica"]]
        pages, slots = stats.get("pages", {}), stats.get("slots", {})
        running.add_metric(labels, stats.get("running", 0))
        waiting.add_metric(labels, stats.get("waiting", 0))
        # what others hold, idle adapters and prefixes, makes room when it is asked for
        held = pages.get("kv", 0) + stats.get("lora_pages", 0)
        usage.add_metric(labels, held / max(1, pages.get("total", 0)))
        config.add_metric([str(stats.get("page_tokens", 0)), str(pages.get("total", 0)), *labels], 1)
        on_gpu.add_metric(labels, slots.get("used", 0))
        on_cpu.add_metric(labels, stats.get("num_host", 0))
        most.add_metric(labels, slots.get("total", 0))
        add_histogram(loads, stats["replica"], stats.get("load_seconds"))
    yield from (
        running,
        waiting,
        usage,
        config,
        _lora_requests_info(replicas, now),
        _adapter_loaded(replicas),
    )
    yield from (on_gpu, on_cpu, most, loads)


def _lora_requests_info(replicas: list[Stats], now: float) -> Metric:
    """Gateways read this one from each replica: lists in labels, the time as the value.

    "Running" is what can be served at once, in use or not: else an idle adapter would look absent and its
    next request would go to a cold replica.
    """
    names = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
    gauge = _gauge("lora_requests_info", "Adapters on this replica.", *names)
    for stats in replicas:
        resident, waiting = (",".join(stats.get(key, ())) for key in ("resident", "awaited"))
        slots = str(stats.get("slots", {}).get("total", 0))
        gauge.add_metric([resident, waiting, slots, stats["replica"]], now)
    return gauge


def _adapter_loaded(replicas: list[Stats]) -> Metric:
    names = ("adapter_name", "level", "pinned", "rank")
    gauge = _gauge("lora_adapter_loaded", "1 where the adapter's weights are.", *names)
    for stats in replicas:
        for name, entry in stats.get("adapters", {}).items():
            if entry.get("tier") in _LEVELS:
                pinned, rank = str(bool(entry.get("pinned"))).lower(), str(entry.get("rank", 0))
                gauge.add_metric([name, _LEVELS[entry["tier"]], pinned, rank, stats["replica"]], 1)
    return gauge


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", text, labels=[*labels, "replica"])
