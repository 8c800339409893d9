"""The statistics of an engine as one JSON value."""

from __future__ import annotations

import json
from typing import Any

from engine.request import AdapterRef
from engine.snapshot import snapshot
from engine.stats import BASE
from tests.engine.fakes import PAGE_BYTES, Harness, image

A, B = AdapterRef("a", "/a", "1"), AdapterRef("b", "/b", "1")


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
