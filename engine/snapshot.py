"""An engine's statistics and residency as one JSON value; its shape is told in `deployments.metrics`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.core import EngineCore
from engine.page_pool import PageKind
from engine.stats import BASE, AdapterStats


def snapshot(core: EngineCore) -> dict[str, Any]:
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
        "load_seconds": core.stats.load_seconds.to_dict(),
        "step_seconds": core.stats.step_seconds.to_dict(),
        "step_adapters": core.stats.step_adapters.to_dict(),
        "adapters": _adapters(core),
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


def _adapters(core: EngineCore) -> dict[str, Any]:
    is_running = {s.request_id for s in core.scheduler.running}
    running: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for request_id, record in core.requests.items():
        counts = running if request_id in is_running else waiting
        counts[record.name or BASE] += 1
    # an adapter read for the first time has no statistics yet
    adapters: dict[str, dict[str, Any]] = {name: {"tier": "loading"} for name in core.manager.loading_names}
    for name, digest in core.manager.names.items():
        resident = core.memory.residency.get(digest)
        adapters[name] = {
            "digest": digest,
            "tier": "hbm" if resident else "host" if digest in core.manager else "source",
            "pages": len(resident.page_ids) if resident else 0,
            "host_bytes": core.manager.image(digest).nbytes if digest in core.manager else 0,
            "pinned": bool(resident and resident.pinned),
        }
    adapters[BASE] = {}
    return {
        name: {
            **facts,
            "running": running[name],
            "waiting": waiting[name],
            **core.stats.adapters.get(name, AdapterStats()).to_dict(),
        }
        for name, facts in adapters.items()
    }
