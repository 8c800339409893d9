from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from engine.tensor_parallel.comm import _open_store, backend_for, meet, tell_all


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["GPU-1", "GPU-2"], "nccl"),
        (["GPU-1", "GPU-1"], "gloo"),
        (["GPU-1", "GPU-2", "GPU-3", "GPU-2"], "gloo"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(gpus: list[str], backend: str) -> None:
    assert backend_for(gpus) == backend


def test_ranks_hear_each_other_in_order(tmp_path: Path) -> None:
    words = ["GPU-2", "GPU-1", "GPU-1"]

    def run(rank: int) -> list[str]:
        store = FileStore(str(tmp_path / "store"), len(words))
        return tell_all(store, rank, len(words), words[rank])

    with ThreadPoolExecutor(len(words)) as ranks:
        assert list(ranks.map(run, range(len(words)))) == [words] * len(words)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_of_several_hosts_meet(host: str) -> None:
    """Of many groups that begin at once none takes another one's port."""
    try:
        places = [meet(host) for _ in range(20)]
    except RuntimeError:
        pytest.skip(f"this machine has no {host}")
    assert len({rendezvous for _, rendezvous in places}) == 20
    for i, (store, rendezvous) in enumerate(places):
        _open_store(rendezvous, 2).set("word", str(i))
        assert store.get("word") == str(i).encode()
