"""Compiles what steps of Llama-3-8B launch on a GPU, and prints what kernels need. None need be here.

    python -m tests.kernels.gpu_binaries --gpu H200 --world 1 2

One JSON object a line, of `Binary`. A process of its own: the interpreter, in which all other tests run, is
chosen when Triton is imported. The runner itself decides what to launch, over tensors without memory; Triton
compiles for the GPU that it is told of, and nothing is launched.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.config import EngineConfig
from engine.model.llama_cuda import AfterBase
from engine.model.loading import allocate_weights
from engine.model.spec import local_spec
from engine.runner.cuda import CudaRunner, _Kind
from engine.runner.step_inputs import Batch
from engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from engine.sharding import Shard, shard_shape
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.all_reduce.triton import all_reduce_add_rms_norm
from kernels.peers.triton import PeerSets, split_symmetric, symmetric_bytes
from kernels.sampling.triton import Logprobs
from kernels.sgmv import Split
from kernels.sgmv.lists import ListCounts
from load_tests.random_engine import SPEC


@dataclass(frozen=True, slots=True)
class Gpu:
    capability: tuple[int, int]
    multi_processor_count: int
    max_shared: int  # bytes of a program


GPUS = {
    "A100": Gpu((8, 0), 108, 163 << 10),
    "L40S": Gpu((8, 9), 142, 99 << 10),
    "H200": Gpu((9, 0), 132, 227 << 10),
    "B200": Gpu((10, 0), 148, 227 << 10),
    "RTX PRO 6000": Gpu((12, 0), 188, 99 << 10),
}
KINDS = [
    _Kind(bucket, has_prefill=bucket > 256, has_adapters=has_adapters)
    for bucket in (8, 64, 256, 512)
    for has_adapters in (False, True)
]
EAGER = 2000  # tokens of a step that is not captured
SAMPLED = 64  # rows of logits
LARGER_WORLDS = (4, 8)


@dataclass(frozen=True, slots=True)
class Binary:
    kernel: str
    world: int  # GPUs of the group whose step launched it first
    tokens: int  # of that step
    constants: dict[str, int]
    num_warps: int
    registers: int  # of a thread
    stack: int  # bytes of a thread: what did not fit
    shared: int  # bytes of a program


class _Driver:
    """Triton's, of a GPU that runs nothing."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    @property
    def utils(self) -> Any:
        return SimpleNamespace(
            load_binary=lambda *args: (0, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": self._gpu.max_shared},
        )

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None

    def get_current_target(self) -> GPUTarget:
        major, minor = self._gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Listener:
    """Hears of all that Triton compiles or finds compiled."""

    def __init__(self) -> None:
        self.world, self.tokens = 0, 0
        self.binaries: list[Binary] = []

    def __call__(
        self, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **rest: Any
    ) -> None:
        path = next(path for name, path in metadata_group.items() if name.endswith(".cubin"))
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(cuobjdump), "--dump-resource-usage", path]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", told)}
        names = {src.fn.arg_names[place[0]]: value for place, value in src.constants.items()}
        binary = Binary(
            kernel=metadata["name"],
            world=self.world,
            tokens=self.tokens,
            constants={name: int(value) for name, value in names.items() if isinstance(value, int)},
            num_warps=metadata["num_warps"],
            registers=usage["REG"],
            stack=usage["STACK"],
            shared=metadata["shared"],
        )
        self.binaries.append(binary)


def compile_steps(gpu: Gpu, worlds: Sequence[int]) -> list[Binary]:
    """`worlds`: sizes of groups."""
    listener = _Listener()
    triton.runtime.driver.set_active(_Driver(gpu))
    triton.knobs.compilation.listener = listener
    with _described(gpu):
        for listener.world in worlds:
            runner = _runner(listener.world)
            for kind in KINDS:
                listener.tokens = kind.bucket
                _take_step(runner, kind)
            listener.tokens = EAGER
            _take_eager_step(runner)
            listener.tokens = SAMPLED
            _sample(runner)
            if listener.world > 1:
                _take_fully_sharded_steps(listener)
                _sum_in_larger_groups(listener)
    return listener.binaries


@contextmanager
def _described(gpu: Gpu) -> Iterator[None]:
    """To PyTorch."""
    names = {
        "torch.cuda.Stream": MagicMock(),
        "torch.cuda.Event": MagicMock(),
        "torch.cuda.current_stream": MagicMock(),
        "torch.cuda.stream": lambda stream: nullcontext(),
        "torch.cuda.get_device_properties": lambda device: gpu,
        "torch.cuda.get_device_capability": lambda device: gpu.capability,
        "engine.runner.cuda.AdapterCopies": MagicMock(),
        "engine.runner.cuda_sampler._pinned_results": lambda num_rows: MagicMock(
            logprobs=Logprobs.allocate(num_rows, MAX_TOP_LOGPROBS, "meta")
        ),
        "engine.runner.cuda_sampler.CudaSampler._start_history": MagicMock(),
    }
    with ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(patch(name, value))
        yield


def _runner(world: int, is_full: bool = False) -> CudaRunner:
    spec, shard = replace(SPEC, shape=replace(SPEC.shape, num_layers=2)), Shard(0, world)
    weights = allocate_weights(shard_shape(spec.shape, shard), False, torch.bfloat16, "meta")
    config = EngineConfig(
        model="", max_num_seqs=256, max_num_batched_tokens=2048, max_adapters=64, max_rank=64
    )
    comm = ALONE if world == 1 else _comm(world, len(weights.lm_head))
    split = Split(0, world, shard_shape(spec.shape, shard).by_output, comm) if is_full else None
    runner = CudaRunner(local_spec(spec, shard), weights, config, 64, 16, 4096, comm, split)
    for workspace in runner._sgmv.values():
        workspace._side = MagicMock()  # as on a GPU: the branch beside a product is launched ahead too
    return runner


def _comm(world: int, vocab_part: int) -> Comm:
    comm = MagicMock()
    comm.peer_buffers = partial(_peer_sets, world)
    comm.column_buffers = lambda max_rows, dtype: _peer_sets(world, max_rows, vocab_part, dtype)
    comm.all_reduce = lambda x: x  # by NCCL, in large steps
    return comm


def _peer_sets(world: int, max_rows: int, width: int, dtype: torch.dtype) -> PeerSets:
    nbytes = symmetric_bytes(world, max_rows, width, dtype)
    memory = [torch.empty(nbytes, dtype=torch.uint8, device="meta") for _ in range(world)]
    return split_symmetric(memory, 0, max_rows, width, dtype)


def _take_fully_sharded_steps(listener: _Listener) -> None:
    runner = _runner(listener.world, is_full=True)
    for kind in KINDS:
        if kind.has_adapters:
            listener.tokens = kind.bucket
            _take_step(runner, kind)


def _sum_in_larger_groups(listener: _Listener) -> None:
    """No step of theirs: what differs is how many parts a program holds."""
    for listener.world, width in itertools.product(LARGER_WORLDS, (SPEC.shape.hidden_size, 8192)):
        rows = torch.empty(SAMPLED, width, dtype=torch.bfloat16, device="meta")
        slots = torch.empty(SAMPLED, dtype=torch.int32, device="meta")
        parts, deltas = _peer_sets(listener.world, SAMPLED, width, rows.dtype)
        all_reduce_add_rms_norm(rows, rows, rows[0], 1e-5, parts, rows, slots, True, True, deltas)


def _take_step(runner: CudaRunner, kind: _Kind) -> None:
    """As it is captured."""
    if kind.has_adapters:
        runner._sgmv[kind.bucket].resolve()
    num_seqs = runner._num_seqs(kind.bucket, kind.has_prefill)
    runner._forward(runner._graph_inputs, kind.bucket, num_seqs, runner._branch(kind))


def _take_eager_step(runner: CudaRunner) -> None:
    runner._eager_sgmv.resolve()
    branch = AfterBase(runner._eager_sgmv, ListCounts(items=8, blocks=8, plain_tokens=100))
    runner._forward(runner._eager_inputs, EAGER, 8, branch)


def _sample(runner: CudaRunner) -> None:
    inputs = runner._graph_inputs
    params = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0, logprobs=2)
    requests = [str(row) for row in range(SAMPLED)]
    for request_id in requests:
        runner.start(request_id, params, 0, (1,))
    runner._sampler.write(requests, inputs.host)
    hidden = torch.empty(SAMPLED, SPEC.shape.hidden_size, dtype=torch.bfloat16, device="meta")
    runner._sample(hidden, Batch(SAMPLED, SAMPLED, (), tuple(requests)), inputs)


def main() -> None:
    parser = ArgumentParser(description="What each kernel of an 8B model's steps needs of a GPU.")
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2], help="sizes of groups")
    args = parser.parse_args()
    for binary in compile_steps(GPUS[args.gpu], args.world):
        print(json.dumps(asdict(binary)))


if __name__ == "__main__":
    main()
