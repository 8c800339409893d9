"""The metrics page: families, labels, bounds."""

from __future__ import annotations

import re
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from deployments.label_cap import LabelCap
from deployments.metrics import render


def adapter(**changed: Any) -> dict[str, Any]:
    return {
        "digest": "d", "tier": "hbm", "running": 0, "waiting": 0, "pages": 40, "pinned": False,
        "hits": {"hbm": 0, "host": 0, "disk": 0}, "misses": 0, "load_failures": 0, "rank": 16,
        "loads": {"disk": 0, "source": 0}, "load_seconds": {"disk": 0.0, "source": 0.0},
        "blocked_seconds_sum": 0.0, "evictions": {},
        "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0, **changed,
    }  # fmt: skip


def replica(name: str = "r1", **changed: Any) -> dict[str, Any]:
    return {"replica": name, "running": 0, "waiting": 0, "adapters": {}, **changed}


def samples(*replicas: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render(replicas, now=1000.0))
        for sample in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def test_requests_are_counted_by_adapter() -> None:
    """FR-70: one series an adapter, with its own number."""
    found = samples(
        replica(running=3, waiting=3, adapters={"A": adapter(running=2), "B": adapter(running=1, waiting=3)})
    )
    assert value(found, "lorafleet_adapter_requests_running", adapter="A", replica="r1") == 2
    assert value(found, "lorafleet_adapter_requests_running", adapter="B", replica="r1") == 1
    assert value(found, "lorafleet_adapter_requests_waiting", adapter="B", replica="r1") == 3
    assert value(found, "lorafleet_requests_running", replica="r1") == 3
    listed = {labels for name, labels in found if name.startswith("lorafleet_")}
    assert not any("," in label_value for labels in listed for _, label_value in labels)


def test_an_idle_resident_adapter_is_listed_and_moves_with_its_tier() -> None:
    """FR-71: loaded before the first request; then in host memory; then gone."""
    resident = samples(replica(adapters={"A": adapter()}, resident=["A", "B"], awaited=["C"]))
    assert value(resident, "lorafleet_adapter_loaded", adapter="A", tier="hbm", replica="r1") == 1
    assert value(
        resident, "vllm:lora_requests_info",
        running_lora_adapters="A,B", waiting_lora_adapters="C", max_lora="0", replica="r1",
    ) == 1000.0  # fmt: skip
    sizes = samples(replica(page_bytes=1000, adapters={"A": adapter(host_bytes=40_000)}))
    for tier in ("hbm", "host"):
        size = value(sizes, "lorafleet_adapter_resident_bytes", adapter="A", tier=tier, replica="r1")
        assert size == 40_000
    host = samples(replica(adapters={"A": adapter(tier="host")}))
    assert value(host, "lorafleet_adapter_loaded", adapter="A", tier="host", replica="r1") == 1
    gone = samples(replica(adapters={"A": adapter(tier="source")}))
    assert not any(name == "lorafleet_adapter_loaded" for name, _ in gone)


def test_slots_loads_and_lookups_by_tier_are_there() -> None:
    """FR-71: slot total and used, load durations, hits and misses."""
    found = samples(
        replica(
            slots={"total": 8, "used": 1},
            load_seconds={"bounds": [0.1, 1.0], "counts": [1, 2, 1], "sum": 5.0},
            adapters={
                "A": adapter(
                    hits={"hbm": 5, "host": 2, "disk": 3},
                    misses=1,
                    evictions={"slot": 3},
                    loads={"disk": 3, "source": 1},
                    load_seconds={"disk": 0.3, "source": 2.0},
                )
            },
        )
    )
    assert value(found, "lorafleet_adapter_slots", replica="r1") == 8
    assert value(found, "lorafleet_adapter_slots_used", replica="r1") == 1
    for tier, count in ("hbm", 5), ("host", 2), ("disk", 3), ("source", 1):
        assert value(found, "lorafleet_adapter_lookups_total", adapter="A", tier=tier, replica="r1") == count
    bucket = "lorafleet_adapter_load_duration_seconds_bucket"
    assert [value(found, bucket, le=le, replica="r1") for le in ("0.1", "1.0", "+Inf")] == [1, 3, 4]
    assert value(found, "lorafleet_adapter_load_duration_seconds_sum", replica="r1") == 5.0
    evictions = "lorafleet_adapter_evictions_total"
    assert value(found, evictions, adapter="A", cause="slot", replica="r1") == 3
    for tier, loads, seconds in ("disk", 3, 0.3), ("source", 1, 2.0):
        labels = {"adapter": "A", "tier": tier, "replica": "r1"}
        assert value(found, "lorafleet_adapter_loads_total", **labels) == loads
        assert value(found, "lorafleet_adapter_load_seconds_total", **labels) == seconds


def test_evictions_by_cause_and_pages_by_owner_are_there() -> None:
    """FR-24: also those that were wanted and could not be."""
    found = samples(
        replica(
            evictions={"hbm": {"pages": 4}, "host": {"bytes": 1}},
            evictions_blocked={"slot": 6},
            prefetches={"hint": {"copied": 5, "used": 3}},
            pages={"total": 10, "free": 3, "kv": 4, "prefix": 1, "adapters": 2},
        )
    )
    assert value(found, "lorafleet_evictions_total", tier="hbm", cause="pages", replica="r1") == 4
    assert value(found, "lorafleet_evictions_blocked_total", cause="slot", replica="r1") == 6
    assert value(found, "lorafleet_prefetches_total", reason="hint", replica="r1") == 5
    assert value(found, "lorafleet_prefetches_used_total", reason="hint", replica="r1") == 3
    pages = {labels: v for (name, labels), v in found.items() if name == "lorafleet_pool_pages"}
    assert sum(pages.values()) == 10


def test_routes_errors_and_first_tokens_are_there() -> None:
    entry = adapter(
        ttft_seconds_sum=1.5, ttft_count=3, errors={"adapter_refused": 2}, finished={"stop": 5, "error": 2}
    )
    found = samples(replica(routes={"spill": 7}, stale_misroutes=2, adapters={"A": entry}))
    for reason, count in ("stop", 5), ("error", 2):
        labels = {"adapter": "A", "finish_reason": reason, "replica": "r1"}
        assert value(found, "lorafleet_requests_total", **labels) == count
    assert value(found, "lorafleet_router_requests_total", reason="spill", replica="r1") == 7
    assert value(found, "lorafleet_router_stale_misroutes_total", replica="r1") == 2
    errors = "lorafleet_request_errors_total"
    assert value(found, errors, adapter="A", code="adapter_refused", replica="r1") == 2
    assert value(found, "lorafleet_adapter_time_to_first_token_seconds_count", adapter="A", replica="r1") == 3
    assert value(found, "lorafleet_adapter_time_to_first_token_seconds_sum", adapter="A", replica="r1") == 1.5


def test_a_replicas_load_is_there() -> None:
    histogram: Any = {"bounds": [1.0], "counts": [2, 1], "sum": 4.0}
    keys = ("ttft_seconds", "tpot_seconds", "e2e_seconds", "step_seconds", "step_adapters")
    found = samples(
        replica(
            running_ranks=48, steps=9, preemptions=2, tokens={"queued": 700, "running": 4096},
            **dict.fromkeys(keys, histogram),
        )
    )  # fmt: skip
    for name, expected in (
        ("running_ranks", 48), ("steps_total", 9), ("preemptions_total", 2), ("queued_tokens", 700),
        ("running_tokens", 4096), ("time_to_first_token_seconds_count", 3),
        ("time_per_output_token_seconds_sum", 4.0), ("request_duration_seconds_count", 3),
        ("step_duration_seconds_count", 3), ("step_adapters_sum", 4.0),
    ):  # fmt: skip
        assert value(found, f"lorafleet_{name}", replica="r1") == expected


def test_gateways_find_vllms_names() -> None:
    found = samples(
        replica(
            running=3, waiting=1, page_tokens=16, lora_pages=20, num_host=1, slots={"total": 8, "used": 1},
            pages={"total": 100, "free": 10, "kv": 30, "prefix": 20, "adapters": 40},
            load_seconds={"bounds": [1.0], "counts": [2, 0], "sum": 0.5},
            adapters={"A": adapter(pinned=True), "B": adapter(tier="host"), "C": adapter(tier="source")},
        )
    )  # fmt: skip
    for name, expected in (
        ("num_requests_running", 3), ("num_requests_waiting", 1), ("kv_cache_usage_perc", 0.5),
        ("num_gpu_loaded_lora_adapters", 1), ("num_cpu_loaded_lora_adapters", 1),
        ("max_gpu_lora_adapters", 8), ("lora_adapter_load_seconds_count", 2),
    ):  # fmt: skip
        assert value(found, f"vllm:{name}", replica="r1") == expected
    assert value(found, "vllm:cache_config_info", block_size="16", num_gpu_blocks="100", replica="r1") == 1
    loaded = {labels for name, labels in found if name == "vllm:lora_adapter_loaded"}
    assert loaded == {
        (("adapter_name", "A"), ("level", "gpu"), ("pinned", "true"), ("rank", "16"), ("replica", "r1")),
        (("adapter_name", "B"), ("level", "cpu"), ("pinned", "false"), ("rank", "16"), ("replica", "r1")),
    }


def test_replicas_are_told_apart() -> None:
    found = samples(replica("r1", running=1), replica("r2", running=2))
    assert value(found, "lorafleet_requests_running", replica="r1") == 1
    assert value(found, "lorafleet_requests_running", replica="r2") == 2


def test_the_base_model_has_tokens_but_no_lookups() -> None:
    found = samples(replica(adapters={"_base": {**adapter(output_tokens=9), "tier": None}}))
    assert value(found, "lorafleet_output_tokens_total", adapter="_base", replica="r1") == 9
    assert not any(name == "lorafleet_adapter_lookups_total" for name, _ in found)


def test_a_fresh_engine_without_numbers_still_has_a_page() -> None:
    assert value(samples({"replica": "r1"}), "lorafleet_requests_running", replica="r1") == 0


def test_names_follow_prometheus_conventions() -> None:
    text = render([replica(adapters={"A": adapter()}, routes={"home": 1}, preemptions=1)])
    names = set(re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE))
    assert names
    assert all(name.startswith("lorafleet_") and name.endswith("_total") for name in names)
    assert not re.search(r"_(ms|milliseconds|kb|mb)\b", text)


def test_a_thousand_adapters_render_in_time_and_within_the_bound() -> None:
    """FR-72. CPU time, because other processes are no fault of ours."""
    used = {"ttft_seconds_sum": 1.5, "ttft_count": 3, "errors": {"overloaded": 1}, "finished": {"stop": 5}}
    entries = {f"adapter-{i}": adapter(host_bytes=1, **used) for i in range(1000)}
    seconds = []
    for _ in range(3):
        started = time.process_time()
        text = render([replica(adapters=entries)])
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.2
    assert text.count("\n") > 20_000
    capped = render([replica(adapters=LabelCap(50).fold(entries))])
    assert capped.count("\n") < 1500
