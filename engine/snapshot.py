"""An engine's statistics and residency as one JSON value; its shape is told in `deployments.metrics`.

Whoever follows an engine gets a whole one first and then news: of adapters, only those that changed. With
thousands of them a whole one takes the step loop's time for many steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.core import EngineCore
from engine.page_pool import PageKind
from engine.stats import BASE, AdapterStats


class SnapshotFeed:
    """For one follower; the core must have no other feed."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._requests: dict[str, tuple[int, int]] = {}  # as told: running and waiting, by adapter
        self._loading: set[str] = set()  # as told: names that have nothing but a load in flight

    def news(self) -> dict[str, Any]:
        """A snapshot whose "adapters" are those that changed; "gone" are those that are no more."""
        core = self._core
        requests = _requests(core)
        manager = core.manager
        loading = {name for name in manager.loading_names if manager.digest_of(name) is None}
        changed = core.stats.touched | manager.touched | (loading ^ self._loading)
        changed |= {name for name, _ in requests.items() ^ self._requests.items()}
        core.stats.touched, manager.touched = set(), set()
        self._requests, self._loading = requests, loading
        told = {n for n in changed if manager.digest_of(n) is not None or n in loading or n == BASE}
        return {
            **_facts(core),
            "adapters": {name: _adapter(core, name, requests) for name in told},
            "gone": sorted(changed - told),
        }


def apply_news(stats: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """The snapshot that follows `stats`; {} before the first news."""
    adapters = dict(stats.get("adapters", {}))
    adapters.update(news["adapters"])
    for name in news["gone"]:
        adapters.pop(name, None)
    whole = {key: value for key, value in news.items() if key != "gone"}
    return {**whole, "adapters": adapters}


def snapshot(core: EngineCore) -> dict[str, Any]:
    requests = _requests(core)
    names = {BASE, *core.manager.names, *core.manager.loading_names}
    return {**_facts(core), "adapters": {name: _adapter(core, name, requests) for name in names}}


def _facts(core: EngineCore) -> dict[str, Any]:
    """All but the adapters."""
    pool = core.memory.pool
    return {
        "running": len(core.scheduler.running),
        "waiting": len(core.requests) - len(core.scheduler.running),
        "max_num_seqs": core.config.max_num_seqs,
        "model": core.geometry.model_digest,
        "tokens": _tokens(core),
        "step_cost": core.step_cost,
        "preemptions": core.stats.preemptions,
        "steps": core.stats.steps,
        "pages": {
            "total": pool.num_pages,
            "free": pool.num_free,
            "kv": pool.num_used(PageKind.SEQUENCE),
            "prefix": pool.num_used(PageKind.PREFIX),
            "adapters": pool.num_used(PageKind.ADAPTER),
        },
        "lora_pages": core.memory.residency.num_leased_pages,
        "running_ranks": _running_ranks(core),
        "page_bytes": core.geometry.page_bytes,
        "page_tokens": core.geometry.page_tokens,
        "slots": {"total": core.memory.residency.num_slots, "used": len(core.memory.residency)},
        "host_cache": {
            "capacity_bytes": core.manager.cache.capacity_bytes,
            "used_bytes": core.manager.cache.used_bytes,
        },
        "evictions": {
            "hbm": dict(core.stats.hbm_evictions),
            "host": {"bytes": core.manager.num_evicted},
        },
        "evictions_blocked": dict(core.scheduler.num_blocked),
        "prefetches": core.scheduler.prefetcher.to_dict(),
        "load_seconds": core.stats.load_seconds.to_dict(),
        "step_seconds": core.stats.step_seconds.to_dict(),
        "step_adapters": core.stats.step_adapters.to_dict(),
    }


def _tokens(core: EngineCore) -> dict[str, int]:
    """Queued: of prompts, and of what was preempted, to be computed yet. Running: with KV in the pool."""
    queued = running = 0
    for record in core.requests.values():
        if record.seq is None:
            queued += len(record.request.prompt_token_ids)
        else:
            queued += record.seq.num_uncomputed
            running += record.seq.num_computed
    return {"queued": queued, "running": running}


def _running_ranks(core: EngineCore) -> int:
    """Sum over the running batch: what its LoRA products cost grows with it."""
    names = (core.requests[seq.request_id].name or BASE for seq in core.scheduler.running)
    return sum(core.stats.adapters[name].rank for name in names if name in core.stats.adapters)


def _requests(core: EngineCore) -> dict[str, tuple[int, int]]:
    """Running and waiting requests of each adapter that has any."""
    is_running = {s.request_id for s in core.scheduler.running}
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for request_id, record in core.requests.items():
        counts = running if request_id in is_running else waiting
        counts[record.name or BASE] += 1
    return {name: (running[name], waiting[name]) for name in running | waiting}


def _adapter(core: EngineCore, name: str, requests: dict[str, tuple[int, int]]) -> dict[str, Any]:
    running, waiting = requests.get(name, (0, 0))
    return {
        **_residency(core, name),
        "running": running,
        "waiting": waiting,
        **core.stats.adapters.get(name, AdapterStats()).to_dict(),
    }


def _residency(core: EngineCore, name: str) -> dict[str, Any]:
    if name == BASE:
        return {}
    digest = core.manager.digest_of(name)
    if digest is None:  # read for the first time
        return {"tier": "loading"}
    resident = core.memory.residency.get(digest)
    is_in_host = digest in core.manager
    return {
        "digest": digest,
        "tier": "hbm" if resident else "host" if is_in_host else "source",
        "pages": len(resident.page_ids) if resident else 0,
        "host_bytes": core.manager.image(digest).nbytes if is_in_host else 0,
        "pinned": bool(resident and resident.pinned),
    }
