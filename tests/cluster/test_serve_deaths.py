"""The proxy of a server that is open to the network dies: HAProxy. Same rules as in `test_deaths.py`.

Takes a minute: `pytest -m slow -s tests/cluster/test_serve_deaths.py` prints how long nobody was answered.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_lowercase

import pytest

from tests.cluster.serve_process import serving
from tests.cluster.test_deaths import LONG, Fleet, lose_the_proxy
from tests.tiny import make_adapter, make_parrot

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

HAPROXY = "haproxy\0-db"  # arguments as /proc has them


def test_an_haproxy_that_dies_breaks_its_streams_and_is_replaced(tmp_path: Path) -> None:
    base = make_parrot(tmp_path / "base", ascii_lowercase.encode(), max_position_embeddings=2 * LONG)
    for seed, name in enumerate(("named", "later")):
        make_adapter(base, tmp_path / name, rank=4, targets=["q_proj"], seed=seed)
    flags = [
        "--model", str(base), "--lora-modules", f"named={tmp_path / 'named'}", "--num-replicas", "2",
        "--pool-bytes", "32000000", "--allow-runtime-lora-updating", "--allowed-lora-prefixes", str(tmp_path),
        "--proxy", "haproxy",
    ]  # fmt: skip
    with serving(flags) as server, ThreadPoolExecutor(16) as threads:
        took_s = lose_the_proxy(Fleet(server, str(tmp_path)), threads, HAPROXY)
    print(f"answers again {took_s:.1f} s after HAProxy died")  # noqa: T201
