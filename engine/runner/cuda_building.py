"""Builds the GPU's runner. Its pool is what is left when all else has been taken once.

    GPU memory:  others' | base weights | workspaces, largest step, graphs | pool | rest
                         └────────────── gpu_memory_fraction of the whole ──────┘

To know what else there is, a runner with a pool of one page warms up first, and is dropped. Serving takes no
more than warming up did: PyTorch keeps what a step has freed, and finds smaller steps' buffers there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.model.loading import LlamaWeights
from engine.model.spec import ModelSpec
from engine.page_plan import PagePlan
from engine.runner.cuda import CudaRunner
from engine.stopwatch import Stopwatch
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.sgmv import Split


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """As it was before the engine took any."""

    total: int  # bytes
    free: int

    @classmethod
    def now(cls) -> GpuMemory:
        torch.cuda.empty_cache()  # what engines before this one left is free
        free, total = torch.cuda.mem_get_info()
        return cls(total, free)

    @property
    def taken(self) -> int:
        """Bytes since then; by others too, but they should leave this GPU alone."""
        return self.free - torch.cuda.mem_get_info()[0]

    def check(self, fraction: float) -> None:
        """Raises InvalidRequest if others have what the engine is to take."""
        budget = int(fraction * self.total)
        if self.free < budget:
            raise InvalidRequest(
                f"gpu_memory_fraction is {fraction}, which is {budget} of the GPU's {self.total} bytes, "
                f"but only {self.free} are free",
                param="gpu_memory_fraction",
            )

    def num_pages(self, fraction: float, taken: int, page_bytes: int) -> int:
        """Of a pool beside `taken` bytes. Raises InvalidRequest if there is not even one."""
        budget = int(fraction * self.total)
        num_pages = (budget - taken) // page_bytes
        if num_pages < 1:
            raise InvalidRequest(
                f"gpu_memory_fraction is {fraction}, which is {budget} of the GPU's {self.total} bytes, "
                f"but base and workspaces take {taken} and one page {page_bytes}",
                param="gpu_memory_fraction",
            )
        return num_pages


def build_cuda_runner(
    config: EngineConfig,
    spec: ModelSpec,
    weights: LlamaWeights,
    pages: PagePlan,
    memory: GpuMemory,
    watch: Stopwatch,
    comm: Comm = ALONE,
    split: Split | None = None,
) -> tuple[CudaRunner, int]:
    """The runner, ready to serve, and its number of pages. Raises InvalidRequest if memory is too small."""

    def build(num_pages: int) -> CudaRunner:
        runner = CudaRunner(spec, weights, config, num_pages, pages.tokens, pages.max_model_len, comm, split)
        runner.warm_up(watch)
        return runner

    num_pages = pages.num_pages
    if num_pages is None:
        with out_of_memory_names("max_num_batched_tokens"):
            rehearsal = build(1)
        own = memory.num_pages(config.gpu_memory_fraction, memory.taken, pages.bytes)
        num_pages = comm.least(own)  # ranks share one page table
        del rehearsal
        gc.collect()
        torch.cuda.empty_cache()
    with out_of_memory_names("pool_bytes" if config.num_pages is None else "num_pages"):
        runner = build(num_pages)
    return runner, num_pages


@contextmanager
def out_of_memory_names(param: str) -> Iterator[None]:
    """Raises InvalidRequest."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(f"the GPU's memory does not suffice: {error}", param=param) from error
