"""Logits of a split vocabulary on all ranks, against NCCL's gather and a concatenation: one process a GPU.

    torchrun --nproc-per-node 2 -m kernels.gather_columns.bench

Columns of Llama-3-8B's vocabulary, bf16, from a graph of 16 calls; slowest rank. Floor: what a rank sends at
400 GB/s.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from kernels.gather_columns.triton import gather_columns
from kernels.peers.sharing import share_memory
from kernels.peers.triton import NUM_SETS
from kernels.timing import graph_us, report, slowest_us

VOCAB, CALLS = 128_256, 16
LINK_BYTES_PER_US = 400_000


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    for num_rows in (1, 8, 64):
        measure(num_rows)
    dist.destroy_process_group()
    return 0


def measure(num_rows: int) -> None:
    world = dist.get_world_size()
    own = torch.randn(num_rows, VOCAB // world, dtype=torch.bfloat16, device="cuda")
    sets = share_memory(num_rows, own.shape[1], own.dtype, own.device)
    assert sets is not None, "these GPUs cannot reach each other's memory"
    assert sets[0].max_rows == num_rows, "more than may be sent at once"
    parts = own.new_empty(world, *own.shape)

    def nccl() -> torch.Tensor:
        dist.all_gather(list(parts), own)
        return torch.cat(list(parts), dim=1)

    def ours(i: int) -> Callable[[], torch.Tensor]:
        return lambda: gather_columns(own, sets[i % NUM_SETS])

    assert torch.equal(ours(0)(), nccl())
    ours(1)()  # so that the graph begins with the first set
    us, nccl_us = (slowest_us(graph_us(calls)) for calls in ([ours(i) for i in range(CALLS)], [nccl] * CALLS))
    if dist.get_rank() == 0:
        floor_us = (world - 1) * own.nbytes / LINK_BYTES_PER_US
        report(f"gather_columns {num_rows} x {VOCAB}", us, floor_us, nccl_us=round(nccl_us, 2))


if __name__ == "__main__":
    raise SystemExit(main())
