"""What a replica counts, and the state that routing reads."""

from __future__ import annotations

from typing import Any

from deployments.replica_books import MAX_NAMED, UNUSED_AFTER_S, ReplicaBooks, routing_stats
from deployments.request_times import RequestTimes
from engine.latecomers import LATE_S


def engine_stats(**adapters: dict[str, Any]) -> dict[str, Any]:
    return {
        "running": 0, "waiting": 0, "max_num_seqs": 32,
        "slots": {"total": 4, "used": sum(a.get("tier") == "hbm" for a in adapters.values())},
        "adapters": adapters,
    }  # fmt: skip


def test_a_request_leaves_its_route_its_wait_and_its_error() -> None:
    books = ReplicaBooks()
    books.arrived("sql", "resident", now=1.0)
    books.first_token("sql", waited_s=0.2)
    assert books.in_use() == {"sql"}
    books.finished("sql", RequestTimes(arrived=1.0), is_error=True)
    books.ended("sql", now=2.0, error="overloaded")
    assert books.in_use() == set()
    merged = books.merge_into(engine_stats(sql={"tier": "hbm"}))
    assert merged["routes"] == {"resident": 1}
    assert merged["adapters"]["sql"] == {
        "tier": "hbm", "ttft_seconds_sum": 0.2, "ttft_count": 1,
        "errors": {"overloaded": 1}, "finished": {"error": 1},
    }  # fmt: skip
    assert sum(merged["ttft_seconds"]["counts"]) == 1


def test_all_adapters_that_are_here_or_awaited_are_named_beyond_the_bound() -> None:
    """FR-71: an idle resident adapter does not look absent."""
    books = ReplicaBooks(max_names=1)
    merged = books.merge_into(
        engine_stats(
            b={"tier": "hbm"}, a={"tier": "hbm"}, c={"tier": "loading", "waiting": 2}, d={"tier": "host"}
        )
    )
    assert (merged["resident"], merged["awaited"]) == (["a", "b"], ["c"])
    assert len(merged["adapters"]) == 2
    assert len(books.merge_into(engine_stats(b={}, a={}), names_all=True)["adapters"]) == 2


def test_merging_leaves_the_engines_statistics_alone() -> None:
    books = ReplicaBooks()
    books.arrived("sql", "home", now=0.0)
    stats = engine_stats(sql={"tier": "hbm"})
    books.merge_into(stats)
    assert stats == engine_stats(sql={"tier": "hbm"})


def test_a_value_on_a_histogram_bound_counts_below_it() -> None:
    books = ReplicaBooks()
    books.arrived("sql", "home", now=0.0)
    for waited_s in (0.01, 0.011, 99.0):
        books.first_token("sql", waited_s)
    histogram = books.merge_into(engine_stats())["ttft_seconds"]
    assert histogram["counts"][:2] == [1, 1]
    assert histogram["counts"][-1] == 1
    assert len(histogram["counts"]) == len(histogram["bounds"]) + 1


def test_an_unloaded_adapter_is_forgotten_unless_in_use() -> None:
    books = ReplicaBooks()
    books.arrived("sql", "home", now=0.0)
    books.forget("sql", now=0.5)
    assert "sql" in books.merge_into(engine_stats())["adapters"]
    books.ended("sql", now=1.0, error=None)
    books.forget("sql", now=1.0)
    assert "sql" not in books.merge_into(engine_stats())["adapters"]


def test_routing_state_is_sorted_by_tier_and_coarse() -> None:
    """Any change is sent to every router, so one request more or less must not change it."""
    books = ReplicaBooks()
    stats = engine_stats(
        b={"tier": "hbm"}, a={"tier": "hbm"}, c={"tier": "loading"}, d={"tier": "host"}, e={"tier": "source"}
    )
    seen = {str(routing_stats({**stats, "running": n}, books, now=0.0)) for n in (5, 6, 7, 8)}
    assert len(seen) == 1
    state = routing_stats({**stats, "running": 9, "waiting": 1}, books, now=0.0)
    assert (state["resident"], state["loading"], state["host"]) == (["a", "b"], ["c"], ["d"])
    assert (state["running"], state["waiting"]) == (12, 4)


def test_an_adapter_that_is_asked_for_and_not_there_is_loading_and_has_its_slot() -> None:
    """Else another one would be sent to the slot that it is about to take."""
    books = ReplicaBooks()
    stats = engine_stats(known={"tier": "host"})
    assert routing_stats(stats, books, now=0.0)["free_slots"] == 4
    for name in ("new", "known", "_base"):
        books.arrived(name, "home", now=0.0)
    state = routing_stats(stats, books, now=0.0)
    assert (state["loading"], state["host"], state["free_slots"]) == (["known", "new"], [], 2)


def test_state_stays_small_with_ten_thousand_adapters() -> None:
    """It names the latest used of each tier."""
    books = ReplicaBooks()
    host = {f"tenant-{i:05}": {"tier": "host"} for i in range(10_000)}
    resident = {f"resident-{i:03}": {"tier": "hbm"} for i in range(400)}
    for i in range(10_000):
        books.arrived(f"tenant-{i:05}", "home", now=float(i % 5000))
        books.ended(f"tenant-{i:05}", now=float(i % 5000), error=None)
    books.arrived("tenant-00000", "host", now=1.0)
    state = routing_stats(engine_stats(**host, **resident), books, now=9999.0)
    assert state["loading"] == ["tenant-00000"]
    assert len(state["resident"]) == MAX_NAMED["hbm"]
    newest = sorted((i % 5000, f"tenant-{i:05}") for i in range(1, 10_000))[-MAX_NAMED["host"] :]
    assert state["host"] == sorted(name for _, name in newest)
    assert len(str(state)) < 16_000


def test_an_adapter_in_use_is_named_before_idle_ones() -> None:
    books = ReplicaBooks()
    books.arrived("old", "resident", now=0.0)
    for name in ("x", "y"):
        books.arrived(name, "resident", now=5.0)
        books.ended(name, now=5.0, error=None)
    assert books.latest({"old", "x", "y", "never"}, 2) == ["old", "y"]


def test_tokens_pages_and_costs_are_told_coarsely() -> None:
    stats = {
        **engine_stats(a={"tier": "hbm"}),
        "tokens": {"queued": 700, "running": 5}, "lora_pages": 41, "step_cost": [0.0052187, 1e-5, 0.0, 2e-6],
        "pages": {"total": 100, "free": 30, "prefix": 15, "kv": 15, "adapters": 40},
    }  # fmt: skip
    state = routing_stats(stats, ReplicaBooks(), now=0.0)
    assert (state["queued_tokens"], state["lora_pages"], state["adapter_pages"]) == (768, 48, 48)
    assert state["step_cost"] == [0.0052, 1e-5, 0.0, 2e-6]


def test_what_routers_do_not_read_is_no_news() -> None:
    """Each step computes tokens and takes pages; every router would hear of it five times a second."""
    stats = {
        **engine_stats(a={"tier": "hbm"}), "tokens": {"queued": 0, "running": 5},
        "pages": {"total": 9000, "free": 8000, "prefix": 0, "kv": 960, "adapters": 40},
    }  # fmt: skip
    later = {**stats, "tokens": {"queued": 0, "running": 999}}
    later["pages"] = {"total": 9000, "free": 4000, "prefix": 10, "kv": 4950, "adapters": 40}
    before = routing_stats(stats, ReplicaBooks(), now=0.0)
    assert before == routing_stats(later, ReplicaBooks(), now=0.0)


def test_a_slot_is_idle_when_nobody_uses_its_adapter_at_this_moment() -> None:
    books = ReplicaBooks()
    for name in ("in_use", "just_used"):
        books.arrived(name, "home", now=0.0)
    books.ended("just_used", now=0.5, error=None)
    stats = engine_stats(
        in_use={"tier": "hbm"}, just_used={"tier": "hbm"}, pinned={"tier": "hbm", "pinned": True}
    )
    state = routing_stats(stats, books, now=1.0)
    assert (state["free_slots"], state["idle_slots"]) == (1, 2)


def test_an_idle_replica_reports_zero_load() -> None:
    state = routing_stats(engine_stats(), ReplicaBooks(), now=0.0)
    assert (state["running"], state["waiting"]) == (0, 0)


def test_a_slot_counts_as_free_when_its_adapter_has_not_been_used_lately() -> None:
    books = ReplicaBooks()
    for name in ("in_use", "just_used", "unused"):
        books.arrived(name, "home", now=0.0)
    books.ended("unused", now=0.0, error=None)
    now = UNUSED_AFTER_S + 1.0
    books.ended("just_used", now=now - 0.5, error=None)
    stats = engine_stats(
        in_use={"tier": "hbm"}, just_used={"tier": "hbm"}, unused={"tier": "hbm"},
        kept={"tier": "hbm", "pinned": True},
    )  # fmt: skip
    assert routing_stats(stats, books, now)["free_slots"] == 1


def test_free_slots_need_pages() -> None:
    books = ReplicaBooks()
    books.arrived("a", "home", now=0.0)
    stats = engine_stats(a={"tier": "hbm"})
    assert routing_stats(stats, books, now=1.0)["free_slots"] == 3
    stats["pages"] = {"total": 100, "free": 30, "prefix": 15, "kv": 15, "adapters": 40}
    assert routing_stats(stats, books, now=1.0)["free_slots"] == 1


def test_an_engine_that_reports_nothing_yet_has_room_for_one() -> None:
    assert routing_stats({}, ReplicaBooks(), now=0.0)["free_slots"] == 1


def test_series_of_an_adapter_that_is_unloaded_in_use_end_with_its_last_request() -> None:
    """FR-72."""
    books = ReplicaBooks()
    for _ in range(2):
        books.arrived("a", "home", now=0.0)
    books.forget("a", now=0.5)
    books.ended("a", now=1.0, error=None)
    assert "a" in books.merge_into({})["adapters"]
    books.ended("a", now=2.0, error=None)
    assert "a" not in books.merge_into({})["adapters"]
    # loaded again before that: it goes on
    books.loaded("a")
    books.arrived("a", "home", now=3.0)
    books.forget("a", now=3.5)
    books.loaded("a")
    books.ended("a", now=6.0, error=None)
    assert "a" in books.merge_into({})["adapters"]


def test_a_request_that_comes_after_the_unload_leaves_no_series() -> None:
    """It was on its way. Later the source may have the adapter again, of which no replica is told."""
    books = ReplicaBooks()
    books.forget("a", now=0.0)
    books.arrived("a", "home", now=1.0)
    assert "a" in books.merge_into({})["adapters"]
    books.ended("a", now=2.0, error="model_not_found")
    assert "a" not in books.merge_into({})["adapters"]
    books.arrived("a", "home", now=LATE_S)
    books.ended("a", now=LATE_S, error=None)
    assert "a" in books.merge_into({})["adapters"]
