"""Engine statistics as Prometheus text, merged over replicas. Knows nothing of Ray or HTTP.

`EngineClient.stats()` returns this JSON, cumulative since the engine started; a key that is missing
counts as zero, and the names under "adapters" are names that the engine accepted, never raw client input:

    {"running": 3, "waiting": 1, "max_num_seqs": 32,
     "preemptions": 0,
     "pages": {"total": 512, "free": 300, "kv": 100, "prefix": 32, "adapters": 80},   # pages by owner
     "page_bytes": 2097152,
     "slots": {"total": 64, "used": 2},                                 # adapter slots
     "host_cache": {"capacity_bytes": 2147483648, "used_bytes": 50331648},
     "evictions": {"hbm": {"pages": 4, "slots": 0}, "host": {"bytes": 1}},            # by tier and cause
     "load_seconds": {"bounds": [0.01, 0.1, 1.0], "counts": [1, 5, 2, 0], "sum": 1.7},  # last: above all
     "adapters": {
        "sql": {"digest": "9f3a...", "tier": "hbm",        # hbm | host | loading | source (known, not here)
                "running": 2, "waiting": 1, "pages": 40, "pinned": false,
                "hits": {"hbm": 90, "host": 4}, "misses": 1,  # once a request: where its adapter was found
                "loads": 2, "load_failures": 0, "load_seconds_sum": 1.1,
                "blocked_seconds_sum": 1.3,                # requests' time spent waiting for its weights
                "evictions": 1,                            # from hbm
                "prompt_tokens": 4096, "cached_tokens": 1024, "output_tokens": 512},
        "_base": {...}}}                                   # the base model: running, waiting and tokens only

A replica adds what it sees itself: "replica" (its id), "routes" ({reason: requests}) and, in each adapter's
entry, "ttft_seconds_sum", "ttft_count" and "errors" ({code: n}); see `engine_deployment.py`.
"""

from __future__ import annotations
