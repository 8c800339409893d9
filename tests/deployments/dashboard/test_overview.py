"""The numbers of the operations page: sums over replicas, rows of adapters, their order and pages."""

from __future__ import annotations

import time

import pytest

from deployments.dashboard.overview import PAGE_ROWS, SORTS, Query, overview
from tests.deployments.dashboard.replicas import adapter, replica


def test_an_adapters_row_sums_over_replicas_and_maps_them() -> None:
    first = adapter(
        hits={"hbm": 6, "host": 1, "disk": 1}, misses=2, running=2, finished={"stop": 9, "error": 1},
        errors={"overloaded": 1}, loads={"disk": 1, "source": 2}, load_seconds={"disk": 0.1, "source": 1.1},
        evictions={"slot": 2, "pages": 1}, output_tokens=70, blocked_seconds_sum=1.5,
    )  # fmt: skip
    second = adapter(tier="host", hits={"hbm": 0, "host": 10, "disk": 0}, waiting=1, pinned=True)
    found = overview([replica("r2", sql=second), replica("r1", sql=first), replica("r3")], Query())
    (row,) = found["adapters"]["rows"]
    assert row["tiers"] == ["hbm", "host", None]
    assert row["lookups"] == {"hbm": 6, "host": 11, "disk": 1, "source": 2}
    assert row["hit_ratio"] == 18 / 20
    assert (row["running"], row["waiting"], row["requests"], row["errors"]) == (2, 1, 10, 1)
    assert (row["loads"], row["load_s"]) == (3, pytest.approx(1.2))
    assert (row["evictions"], row["blocked_s"], row["output_tokens"]) == (3, 1.5, 70)
    assert row["pinned"]


def test_the_fleet_is_the_sum_and_the_base_model_no_adapter() -> None:
    base = adapter(finished={"stop": 5}, output_tokens=50)
    found = overview([replica("r1", sql=adapter(finished={"stop": 2}), _base=base), replica("r2")], Query())
    totals = found["totals"]
    assert (totals["requests"], totals["output_tokens"]) == (7, 50)
    assert (totals["adapters"], totals["resident"]) == (1, 1)
    assert (totals["first_tokens"], totals["first_token_s"]) == (8, 4.0)
    assert [one["id"] for one in found["replicas"]] == ["r1", "r2"]
    assert found["replicas"][0]["pages"] == {"free": 40, "kv": 30, "prefix": 10, "adapters": 20}


def test_an_adapter_that_nobody_asked_for_has_no_ratio_and_is_on_no_replica() -> None:
    (row,) = overview([replica("r1", sql=adapter(tier="source"))], Query())["adapters"]["rows"]
    assert (row["hit_ratio"], row["tiers"]) == (None, [None])


def test_a_fresh_fleet_has_a_page() -> None:
    assert overview([], Query())["adapters"] == {"rows": [], "matching": 0, "page": 0, "num_pages": 1}
    assert overview([{"replica": "r1"}], Query())["replicas"][0]["seats"] == 0


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("hot", "hot"),
        ("misses", "missed"),
        ("hit_ratio", "missed"),
        ("blocked", "slow"),
        ("evictions", "out"),
        ("name", "a"),
    ],
)
def test_orders(sort: str, first: str) -> None:
    hits = {"hbm": 9, "host": 0, "disk": 0}
    rows = {
        "z": adapter(hits=hits),
        "a": adapter(),
        "hot": adapter(running=1, hits=hits),
        "missed": adapter(misses=9),
        "slow": adapter(blocked_seconds_sum=3.0, hits=hits),
        "out": adapter(evictions={"slot": 1}, hits=hits),
    }
    found = overview([replica("r1", **rows)], Query(sort=sort))
    assert found["adapters"]["rows"][0]["name"] == first
    assert sort in SORTS


def test_thousands_are_searched_and_paged_in_time() -> None:
    rows = {f"tenant-{i:04d}": adapter() for i in range(5000)}
    started = time.perf_counter()
    found = overview([replica("r1", **rows), replica("r2", **rows)], Query("TENANT-0", "name", 1))
    assert time.perf_counter() - started < 1.0
    page = found["adapters"]
    assert (page["matching"], page["num_pages"], page["page"]) == (1000, 1000 // PAGE_ROWS, 1)
    assert page["rows"][0]["name"] == f"tenant-{PAGE_ROWS:04d}"
    beyond = overview([replica("r1", **rows)], Query("tenant-0", "name", 999))["adapters"]
    assert (beyond["page"], len(beyond["rows"])) == (19, PAGE_ROWS)
