"""A short run of the soak; `python -m tests.engine.soak` runs it for half an hour."""

from __future__ import annotations

import secrets
from pathlib import Path

from tests.engine.soak import soak

SECONDS = 20.0


def test_everything_at_once(tmp_path: Path) -> None:
    seed = secrets.randbelow(1 << 32)
    counts = soak(tmp_path, SECONDS, seed)
    # it did what it is for
    for name in ("length", "abort", "AdapterRefused", "evictions", "prefetched by hint"):
        assert counts[name] > 0, (seed, counts)
