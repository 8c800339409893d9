"""Memory of a group's GPUs that all of them can write."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from kernels.all_reduce.triton import PeerBuffers, split_symmetric, symmetric_bytes

logger = logging.getLogger(__name__)

MOST_LINK_BYTES = 8 << 20
"""That a rank may send for one sum. Measured up to 2 MiB, where NCCL takes 2.5 times as long."""


def share_memory(max_rows: int, width: int, dtype: torch.dtype) -> tuple[PeerBuffers, PeerBuffers] | None:
    """The sets for sums of `max_rows` rows or fewer; None where GPUs do not reach each other.

    All ranks of the default process group must call it at once.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    max_rows = min(max_rows, MOST_LINK_BYTES // ((world - 1) * width * dtype.itemsize))
    nbytes = symmetric_bytes(world, max_rows, width, dtype)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        own.zero_()
        group = dist.group.WORLD
        assert group is not None
        shared = symmetric_memory.rendezvous(own, group)
        tensors = [shared.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(world)]
    except RuntimeError as error:
        logger.warning("no memory shared between GPUs, sums go through NCCL: %s", error)
        return None
    torch.cuda.synchronize()
    dist.barrier()  # all have zeroed theirs
    # the tensors are bare addresses, which these two keep mapped
    return split_symmetric(tensors, rank, max_rows, width, dtype, owner=(own, shared))
