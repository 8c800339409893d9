"""Bounded label cardinality without counters that jump."""

from __future__ import annotations

from typing import Any

from deployments.label_cap import OTHER, LabelCap


def entry(count: int) -> dict[str, Any]:
    return {"digest": "d", "tier": "hbm", "pinned": False, "loads": count, "hits": {"hbm": count, "host": 1}}


def test_few_adapters_keep_their_entries() -> None:
    entries = {"a": entry(1), "b": entry(2)}
    assert LabelCap(2).fold(entries) == entries


def test_the_rest_share_one_entry_with_the_sums() -> None:
    """FR-72."""
    folded = LabelCap(1).fold({"a": entry(1), "b": entry(2), "c": entry(3)})
    assert folded == {"a": entry(1), OTHER: {"loads": 5, "hits": {"hbm": 5, "host": 2}}}


def test_a_named_adapter_stays_named_however_hot_others_get() -> None:
    cap = LabelCap(1)
    cap.fold({"a": entry(1)})
    assert set(cap.fold({"z": entry(99), "a": entry(1)})) == {"a", OTHER}


def test_a_deleted_adapter_gives_its_name_up() -> None:
    """FR-72: names of deleted adapters are dropped."""
    cap = LabelCap(1)
    cap.fold({"a": entry(1)})
    assert set(cap.fold({"b": entry(1)})) == {"b"}


def test_the_number_of_series_does_not_grow_with_the_number_of_adapters() -> None:
    """FR-72."""
    cap = LabelCap(10)
    for i in range(0, 5000, 100):
        assert len(cap.fold({f"adapter-{j}": entry(1) for j in range(i, i + 100)})) == 11
