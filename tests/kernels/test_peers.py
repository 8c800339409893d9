"""All ranks share memory or none does, whichever fails: processes over gloo, memory of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from kernels.peers.sharing import share_memory
from kernels.peers.triton import EMPTY, symmetric_bytes

WORLD, MAX_ROWS, WIDTH = 3, 2, 8
CPU = torch.device("cpu")


class FakeMemory:
    """In the place of PyTorch's symmetric memory; `failing`: a rank, and what fails there."""

    def __init__(self, memory: list[torch.Tensor], failing: tuple[int, str] | None) -> None:
        self._memory = memory
        self._failing = failing

    def empty(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._fail("empty")
        own = self._memory[dist.get_rank()]
        assert own.shape == (nbytes,)
        return own

    def rendezvous(self, own: torch.Tensor, group: dist.ProcessGroup) -> FakeMemory:
        dist.barrier()
        self._fail("rendezvous")
        return self

    def get_buffer(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[rank]

    def _fail(self, step: str) -> None:
        if self._failing == (dist.get_rank(), step):
            raise RuntimeError("no link")


class Group:
    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._path = path

    def run(self, failing: tuple[int, str] | None = None) -> list[list[int]]:
        """[ranks, groups in turn]: whether a rank shares memory in a group, 1 or 0."""
        nbytes = symmetric_bytes(WORLD, MAX_ROWS, WIDTH, torch.float32)
        memory = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(WORLD)]
        shares = torch.full((WORLD, 2), -1, dtype=torch.int32)
        for tensor in (*memory, shares):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        fake = FakeMemory(memory, failing)
        self._monkeypatch.setattr("kernels.peers.sharing.symmetric_memory", fake)
        arguments = (self._path, memory, shares)
        start_processes(_run_rank, arguments, nprocs=WORLD, start_method="fork")  # type: ignore[no-untyped-call]
        taken: list[list[int]] = shares.tolist()
        return taken


def _run_rank(rank: int, path: Path, memory: list[torch.Tensor], shares: torch.Tensor) -> None:
    torch.set_num_threads(1)
    for i in range(2):
        dist.init_process_group("gloo", f"file://{path}/{i}", world_size=WORLD, rank=rank)
        first, again = (share_memory(MAX_ROWS, WIDTH, torch.float32, CPU) for _ in range(2))
        if first is not None:
            assert all(bool((tensor == EMPTY).all()) for tensor in memory)
            assert first[0].rank == rank
            assert [rows.data_ptr() for rows in first[0].rows] == [m.data_ptr() for m in memory]
        assert (first is None) == (again is None)
        shares[rank, i] = first is not None
        dist.destroy_process_group()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(tmp_path, monkeypatch)


def test_all_share_in_the_first_group_of_their_processes_only(group: Group) -> None:
    assert group.run() == [[1, 0]] * WORLD


@pytest.mark.parametrize("step", ["empty", "rendezvous"])
def test_what_one_cannot_do_none_does(group: Group, step: str) -> None:
    assert group.run(failing=(1, step)) == [[0, 0]] * WORLD


def test_ranks_on_several_hosts_share_nothing(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: f"host-{dist.get_rank() // 2}")
    assert group.run() == [[0, 0]] * WORLD
