"""What the operations page shows, from the replicas' statistics (see `deployments.metrics`). Pure.

Counters stay counters: the page makes rates of them, from one answer to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.stats import BASE

Stats = Mapping[str, Any]
Row = dict[str, Any]

TIERS = ("hbm", "host", "disk", "source")  # where a lookup finds its adapter, cheapest first
PAGE_ROWS = 50

_SORTS: dict[str, Callable[[Row], Any]] = {
    "hot": lambda row: (-(row["running"] + row["waiting"]), -row["requests"]),
    "misses": lambda row: -row["lookups"]["source"],
    "hit_ratio": lambda row: 1.0 if row["hit_ratio"] is None else row["hit_ratio"],
    "blocked": lambda row: -row["blocked_s"],
    "evictions": lambda row: -row["evictions"],
    "name": lambda row: row["name"],
}
SORTS = tuple(_SORTS)


@dataclass(frozen=True, slots=True)
class Query:
    search: str = ""  # part of an adapter's name
    sort: str = "hot"
    page: int = 0


def overview(replicas: Iterable[Stats], query: Query) -> dict[str, Any]:
    """The base model is in the totals, and no row of the adapters."""
    found = sorted(replicas, key=lambda stats: str(stats["replica"]))
    rows = _rows(found)
    adapters = [row for name, row in rows.items() if name != BASE]
    return {
        "replicas": [_replica(stats) for stats in found],
        "totals": _totals(found, [*rows.values()], adapters),
        "adapters": _page(adapters, query),
    }


def _replica(stats: Stats) -> dict[str, Any]:
    slots, host, pages = (stats.get(key, {}) for key in ("slots", "host_cache", "pages"))
    return {
        "id": stats["replica"],
        "running": stats.get("running", 0),
        "waiting": stats.get("waiting", 0),
        "seats": stats.get("max_num_seqs", 0),
        "ranks": stats.get("running_ranks", 0),
        "preemptions": stats.get("preemptions", 0),
        "pages": {owner: count for owner, count in pages.items() if owner != "total"},
        "page_bytes": stats.get("page_bytes", 0),
        "slots": {"used": slots.get("used", 0), "total": slots.get("total", 0)},
        "host_bytes": {"used": host.get("used_bytes", 0), "total": host.get("capacity_bytes", 0)},
    }


def _rows(replicas: list[Stats]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for index, stats in enumerate(replicas):
        for name, entry in stats.get("adapters", {}).items():
            row = rows.setdefault(name, _empty_row(name, len(replicas)))
            _add(row, index, entry)
    for row in rows.values():
        num_lookups = sum(row["lookups"].values())
        hits = num_lookups - row["lookups"]["source"]
        row["hit_ratio"] = hits / num_lookups if num_lookups else None
    return rows


def _empty_row(name: str, num_replicas: int) -> Row:
    numbers = (
        "running",
        "waiting",
        "requests",
        "errors",
        "output_tokens",
        "loads",
        "evictions",
        "load_failures",
    )
    return {
        "name": name,
        **dict.fromkeys(numbers, 0),
        "load_s": 0.0,
        "blocked_s": 0.0,
        "lookups": dict.fromkeys(TIERS, 0),
        "tiers": [None] * num_replicas,  # hbm, host, loading or None, by replica
        "pinned": False,
    }


def _add(row: Row, index: int, entry: Stats) -> None:
    for key in ("running", "waiting", "output_tokens", "load_failures"):
        row[key] += entry.get(key, 0)
    for key, inner in (
        ("requests", "finished"),
        ("errors", "errors"),
        ("loads", "loads"),
        ("evictions", "evictions"),
    ):
        row[key] += sum(entry.get(inner, {}).values())
    row["load_s"] += sum(entry.get("load_seconds", {}).values())
    row["blocked_s"] += entry.get("blocked_seconds_sum", 0.0)
    if row["name"] != BASE:
        found = {**entry.get("hits", {}), "source": entry.get("misses", 0)}
        for tier in TIERS:
            row["lookups"][tier] += found.get(tier, 0)
        row["tiers"][index] = entry.get("tier") if entry.get("tier") != "source" else None
        row["pinned"] = row["pinned"] or bool(entry.get("pinned"))


def _totals(replicas: list[Stats], rows: list[Row], adapters: list[Row]) -> dict[str, Any]:
    ttft = [stats["ttft_seconds"] for stats in replicas if "ttft_seconds" in stats]
    return {
        "requests": sum(row["requests"] for row in rows),
        "errors": sum(row["errors"] for row in rows),
        "output_tokens": sum(row["output_tokens"] for row in rows),
        "lookups": {tier: sum(row["lookups"][tier] for row in adapters) for tier in TIERS},
        "first_tokens": sum(sum(histogram["counts"]) for histogram in ttft),
        "first_token_s": sum(histogram["sum"] for histogram in ttft),
        "adapters": len(adapters),
        "resident": sum("hbm" in row["tiers"] for row in adapters),
    }


def _page(adapters: list[Row], query: Query) -> dict[str, Any]:
    wanted = query.search.casefold()
    matching = [row for row in adapters if wanted in row["name"].casefold()]
    key = _SORTS[query.sort]
    matching.sort(key=lambda row: (key(row), row["name"]))
    num_pages = max(1, -(-len(matching) // PAGE_ROWS))
    page = min(max(0, query.page), num_pages - 1)
    rows = matching[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    return {"rows": rows, "matching": len(matching), "page": page, "num_pages": num_pages}
