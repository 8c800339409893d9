"""Statistics of replicas, as the operations page is given them."""

from __future__ import annotations

from typing import Any


def adapter(**changed: Any) -> dict[str, Any]:
    return {
        "tier": "hbm", "running": 0, "waiting": 0, "pinned": False,
        "hits": {"hbm": 0, "host": 0, "disk": 0}, "misses": 0,
        "loads": {"disk": 0, "source": 0}, "load_seconds": {"disk": 0.0, "source": 0.0}, "load_failures": 0,
        "blocked_seconds_sum": 0.0, "evictions": {}, "output_tokens": 0, "finished": {}, "errors": {},
        **changed,
    }  # fmt: skip


def replica(name: str, **adapters: dict[str, Any]) -> dict[str, Any]:
    return {
        "replica": name, "running": 3, "waiting": 1, "max_num_seqs": 8, "running_ranks": 24, "preemptions": 2,
        "pages": {"total": 100, "free": 40, "kv": 30, "prefix": 10, "adapters": 20}, "page_bytes": 4096,
        "slots": {"used": 2, "total": 4}, "host_cache": {"used_bytes": 1 << 20, "capacity_bytes": 1 << 30},
        "ttft_seconds": {"bounds": [1.0], "counts": [3, 1], "sum": 2.0}, "adapters": adapters,
    }  # fmt: skip
