"""Residual add and RMSNorm behind a sum over ranks, fused against NCCL's sum and a launch: one process a GPU.

    torchrun --nproc-per-node 2 -m kernels.all_reduce.bench

Rows of Llama-3-8B, bf16, from a graph of 64 calls; slowest rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from kernels.all_reduce.triton import all_reduce_add_rms_norm
from kernels.peers.sharing import share_memory
from kernels.peers.triton import NUM_SETS
from kernels.rms_norm.triton import add_rms_norm
from kernels.timing import graph_us, slowest_us

WIDTH, EPS, CALLS = 4096, 1e-5, 64


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    for num_rows in (1, 8, 64, 256):
        fused, nccl = (slowest_us(us) for us in measure(num_rows))
        if dist.get_rank() == 0:
            sys.stdout.write(f"{num_rows:4} rows: {fused:6.2f} us fused, {nccl:6.2f} us with NCCL\n")
    dist.destroy_process_group()
    return 0


def measure(num_rows: int) -> tuple[float, float]:
    device = torch.device("cuda", torch.cuda.current_device())
    sets = share_memory(num_rows, WIDTH, torch.bfloat16, device)
    assert sets is not None, "these GPUs cannot reach each other's memory"
    residual, y, weight = _randn(num_rows, WIDTH), _randn(num_rows, WIDTH), _randn(WIDTH)
    dist.broadcast(residual, 0)
    want, summed = residual.clone(), y.clone()
    dist.all_reduce(summed)
    want += summed
    all_reduce_add_rms_norm(residual, y, weight, EPS, sets[0])
    torch.testing.assert_close(residual, want)
    all_reduce_add_rms_norm(residual, y, weight, EPS, sets[1])  # so that the graph begins with the first set

    def fused(i: int) -> Callable[[], object]:
        return lambda: all_reduce_add_rms_norm(residual, y, weight, EPS, sets[i % NUM_SETS])

    def nccl() -> None:
        dist.all_reduce(y)
        add_rms_norm(residual, y, weight, EPS)

    return graph_us([fused(i) for i in range(CALLS)]), graph_us([nccl] * CALLS)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
