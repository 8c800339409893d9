"""The statistics of an engine as one JSON value."""

from __future__ import annotations

import json
from typing import Any

from engine.request import AdapterRef
from engine.snapshot import snapshot
from engine.stats import BASE
from tests.engine.fakes import PAGE_BYTES, Harness, image

A, B, C = (AdapterRef(name, f"/{name}", "1") for name in "abc")


def taken(harness: Harness) -> dict[str, Any]:
    """As it is read at the other end of the socket."""
    found: dict[str, Any] = json.loads(json.dumps(snapshot(harness.core)))
    return found


def test_loads_and_lookups_tell_disk_from_source() -> None:
    harness = Harness()
    for ref, number in ((A, 1), (B, 2)):
        harness.add(ref.name, ref)
        harness.loaded(ref, image(number, is_from_disk=ref is B))
    harness.run()
    entries = taken(harness)["adapters"]
    assert (entries["a"]["misses"], entries["a"]["hits"]["disk"]) == (1, 0)
    assert (entries["b"]["misses"], entries["b"]["hits"]["disk"]) == (0, 1)
    assert entries["a"]["loads"] == {"disk": 0, "source": 1}
    assert entries["b"]["loads"] == {"disk": 1, "source": 0}


def test_an_adapters_evictions_are_counted_by_cause() -> None:
    harness = Harness(max_adapters=1)
    for ref, number in ((A, 1), (B, 2)):
        harness.add(ref.name, ref)
        harness.loaded(ref, image(number))
        harness.run()
    entries = taken(harness)["adapters"]
    assert (entries["a"]["evictions"], entries["b"]["evictions"]) == ({"slot": 1}, {})
    assert (entries["a"]["tier"], entries["a"]["host_bytes"]) == ("host", 2 * PAGE_BYTES)
    assert (entries["b"]["tier"], entries["b"]["pages"]) == ("hbm", 2)


def test_requests_that_run_and_wait_are_counted_by_adapter() -> None:
    """FR-70: A has 2 running; B has 1, and 3 waiting, of which one waits for its weights."""
    harness = Harness(max_num_seqs=3)
    for ref, number in ((A, 1), (B, 2)):
        harness.core.load_adapter(ref.name, ref)
        harness.loaded(ref, image(number))
    for name, ref in (("a1", A), ("a2", A), ("b1", B)):
        harness.add(name, ref, max_tokens=9)
    harness.step()
    for name in ("b2", "b3"):
        harness.add(name, B)
    harness.add("b4", AdapterRef("b", "/b", "2"))
    harness.step()
    entries = taken(harness)["adapters"]
    counts = {name: (entry["running"], entry["waiting"]) for name, entry in entries.items()}
    assert counts == {"a": (2, 0), "b": (1, 3), BASE: (0, 0)}


def test_an_adapter_is_told_where_it_is_whether_anybody_uses_it_or_not() -> None:
    """FR-71: in the pool before its first request and after an idle minute; then in host memory; gone."""
    harness = Harness(max_adapters=1, host_cache_bytes=3 * PAGE_BYTES)

    def tier() -> str:
        found = taken(harness)
        assert found["slots"] == {"total": 1, "used": 1}
        told: str = found["adapters"]["a"]["tier"]
        return told

    harness.core.load_adapter("at the start", A)
    harness.loaded(A, image(1))
    harness.step()
    assert tier() == "hbm"
    harness.add("used", A)
    harness.run()
    harness.now += 60.0
    harness.step()
    assert tier() == "hbm"
    harness.add("other", B)
    harness.loaded(B, image(2, num_pages=1))
    harness.run()
    assert tier() == "host"
    harness.add("third", C)
    harness.loaded(C, image(3, num_pages=1))
    harness.run()
    assert tier() == "source"
    harness.core.unload_adapter("unload", "a")
    assert "a" not in taken(harness)["adapters"]


def test_steps_are_counted_with_their_adapters_and_ranks() -> None:
    harness = Harness()
    for name, ref in (("x", A), ("y", A), ("z", None)):
        harness.add(name, ref)
    harness.loaded(A, image(1))
    harness.core.step()
    found = taken(harness)
    assert found["running_ranks"] == 2 * 8
    harness.run()
    found = taken(harness)
    assert found["running_ranks"] == 0
    assert found["step_adapters"]["sum"] > 0
    assert sum(found["step_adapters"]["counts"]) == found["steps"]
    assert 0 < sum(found["step_seconds"]["counts"]) <= found["steps"]
    assert BASE in found["adapters"]


def test_tokens_that_wait_and_tokens_with_kv_are_told_apart() -> None:
    """The router predicts waits from them: prompts that load, prompts that queue, what runs."""
    harness = Harness()
    harness.add("loads", A, length=7)
    harness.add("queues", length=5)
    assert taken(harness)["tokens"] == {"queued": 12, "running": 0}
    harness.core.step()
    tokens = taken(harness)["tokens"]
    assert tokens["running"] == 5
    assert 7 <= tokens["queued"] <= 8  # and the next token of the one that runs
    harness.loaded(A, image(1))
    harness.core.step()
    assert taken(harness)["lora_pages"] == 2
    harness.run()
    assert taken(harness)["tokens"] == {"queued": 0, "running": 0}
