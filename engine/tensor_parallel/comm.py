"""What the ranks of a group exchange in a step: two sums a layer, and the parts of the logits.

With fully sharded adapters also what lies between their A and B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

if TYPE_CHECKING:
    from kernels.peers.triton import PeerSets

# of one tensor, so that NCCL copies nothing; PyTorch 2.13 has given them new names, and the old ones warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TCP = "tcp://"

Backend = Literal["nccl", "gloo"]


class Comm(Protocol):
    can_be_captured: bool
    """In a CUDA graph."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; `x` is used up."""

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Of each rank its columns, side by side in order of rank: [N, own] -> [N, all]."""

    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Of each rank its [size], in order of rank: [N, size]."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' [N, size]; each rank gets its row: [size]."""

    def swap(self, blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Block i goes to rank i; from rank i comes what it has for this one, of `sizes[i]` elements."""

    def least(self, value: int) -> int:
        """Of all ranks'."""

    def peer_buffers(self, max_rows: int, width: int, dtype: torch.dtype) -> PeerSets | None:
        """To send each other `max_rows` rows, or fewer where that is more than may be sent at once.

        None on all ranks if there is no memory that they share: then all goes through the calls above.
        """

    def column_buffers(self, max_rows: int, dtype: torch.dtype) -> PeerSets | None:
        """The same for kernels.gather_columns in the place of `gather_columns`."""


class Alone:
    """A group of one."""

    can_be_captured = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x[0]

    def swap(self, blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(blocks)

    def least(self, value: int) -> int:
        return value

    def peer_buffers(self, max_rows: int, width: int, dtype: torch.dtype) -> PeerSets | None:
        return None

    def column_buffers(self, max_rows: int, dtype: torch.dtype) -> PeerSets | None:
        return None


ALONE = Alone()


class Ranks:
    """The default process group of torch.distributed, which must be initialised: NCCL, or gloo."""

    def __init__(self, widths: Sequence[int]) -> None:
        """`widths`: columns that each rank gives to `gather_columns`."""
        self.can_be_captured = dist.get_backend() == "nccl"
        self.num_reduced = 0  # sums so far; those of a captured graph count once
        self.num_exchanged = 0  # of what lies between A and B
        self._widths = list(widths)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_reduced += 1
        dist.all_reduce(x)
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        # gloo gathers in host memory only
        own = x if self.can_be_captured else x.cpu()
        num_rows, width = own.shape
        widest = max(self._widths)  # parts of the same size are what all backends can do
        if width < widest:
            own = torch.nn.functional.pad(own, (0, widest - width))
        parts = list(own.new_empty(len(self._widths), num_rows, widest))
        dist.all_gather(parts, own.contiguous())
        columns = zip(parts, self._widths, strict=True)
        return torch.cat([part[:, :width] for part, width in columns], dim=1).to(x.device)

    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        self.num_exchanged += 1
        own = x if self.can_be_captured else x.cpu()
        parts = own.new_empty(len(self._widths), len(x))
        _all_gather(parts.view(-1), own)
        return parts.to(x.device)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        self.num_exchanged += 1
        parts = x if self.can_be_captured else x.cpu()
        own = parts.new_empty(x.shape[1])
        _reduce_scatter(own, parts.view(-1))
        return own.to(x.device)

    def swap(self, blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        dtype = blocks[0].dtype
        # as bytes: gloo knows no bfloat16
        given = torch.cat([block.flatten() for block in blocks]).view(torch.uint8)
        if self.can_be_captured:
            given = given.cuda()
        taken = given.new_empty(sum(sizes) * dtype.itemsize)
        dist.all_to_all_single(
            taken,
            given,
            [size * dtype.itemsize for size in sizes],
            [block.numel() * dtype.itemsize for block in blocks],
        )
        return list(torch.split(taken.view(dtype), list(sizes)))

    def least(self, value: int) -> int:
        values = torch.tensor([value], device="cuda" if self.can_be_captured else "cpu")
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values)

    def peer_buffers(self, max_rows: int, width: int, dtype: torch.dtype) -> PeerSets | None:
        if not self.can_be_captured:
            return None  # a process has no GPU of its own
        # triton takes a second to import, and the CPU backend needs it not
        from kernels.peers.sharing import share_memory

        return share_memory(max_rows, width, dtype, torch.device("cuda", torch.cuda.current_device()))

    def column_buffers(self, max_rows: int, dtype: torch.dtype) -> PeerSets | None:
        are_equal = len(set(self._widths)) == 1
        return self.peer_buffers(max_rows, self._widths[0], dtype) if are_equal else None


def leave() -> None:
    """This process may join another group, if it is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def join(rank: int, world: int, rendezvous: str, device: str) -> None:
    """Initialise the default process group; returns when all ranks have.

    `rendezvous`: a file of theirs, or what `meet` returned.
    """
    store = _open_store(rendezvous, world)
    store.set_timeout(default_pg_timeout)  # as init_process_group does with a store that it makes
    backend: Backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        backend = backend_for(tell_all(store, rank, world, str(gpu)))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def meet(host: str) -> tuple[Store, str]:
    """For ranks of several hosts: where they meet, as long as it is kept, and what `join` takes."""
    # on a port that the kernel picks: one that was free a moment ago may be taken by now
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{_TCP}[{host}]:{store.port}" if ":" in host else f"{_TCP}{host}:{store.port}"


def _open_store(rendezvous: str, world: int) -> Store:
    if not rendezvous.startswith(_TCP):
        return FileStore(rendezvous, world)
    url = urlsplit(rendezvous)
    assert url.hostname is not None
    assert url.port is not None
    return TCPStore(url.hostname, url.port, world, wait_for_workers=False, timeout=default_pg_timeout)


def backend_for(gpus: Sequence[str]) -> Backend:
    """`gpus`: which one each rank has. NCCL takes no two ranks on one."""
    return "nccl" if len(set(gpus)) == len(gpus) else "gloo"


def tell_all(store: Store, rank: int, world: int, word: str) -> list[str]:
    """What each rank tells, in order of rank; before there is a process group."""
    store.set(f"rank {rank}", word)
    return [store.get(f"rank {r}").decode() for r in range(world)]
