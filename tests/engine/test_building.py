from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.building import _log_memory, decide_lora_sharding
from engine.errors import InvalidRequest
from engine.model.spec import load_model_spec
from engine.tensor_parallel.costs import Batch, GroupCost
from tests.engine.test_sharding import LLAMA_8B
from tests.tiny import ALL_LINEAR, make_adapter, make_llama


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"pool_bytes": 100}, "pool_bytes"), ({"max_model_len": 513}, "max_model_len")],
)
def test_what_cannot_be_built_names_the_option(tmp_path: Path, settings: dict[str, int], param: str) -> None:
    base = make_llama(tmp_path / "base")
    with pytest.raises(InvalidRequest) as caught:
        Engine(EngineConfig(model=str(base), **settings))  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_missing_gpu_is_told_at_start(tmp_path: Path, num_ranks: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Engine(EngineConfig(model=str(tmp_path), device="cuda", tensor_parallel_size=num_ranks))
    assert caught.value.param == "device"


def test_a_gpu_that_kernels_cannot_use_is_told_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    with pytest.raises(InvalidRequest, match=r"capability 7\.5, and 8\.0 is needed") as error:
        Engine(EngineConfig(model=str(make_llama(tmp_path / "base")), device="cuda"))
    assert error.value.param == "device"


def test_small_models_get_pages_that_hold_an_adapter_tile(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", num_hidden_layers=1, num_key_value_heads=1)
    engine = Engine(EngineConfig(model=str(base), num_pages=8))
    # 1 layer x 2 x 16 tokens x 16 elements is a quarter of a tile of 16 x 128
    assert engine.core.geometry.page_tokens == 64
    engine.close()


def test_the_start_tells_times_and_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FR-36: adapters and KV share the pool."""
    base = make_llama(tmp_path / "base")
    with caplog.at_level("INFO", "engine.building"):
        engine = Engine(EngineConfig(model=str(base), num_pages=8))
    memory, ready = [record.getMessage() for record in caplog.records]
    pages = 8 * engine.core.geometry.page_bytes
    parameters = sum(tensor.numel() for tensor in _tensors(base))
    assert f"base {4 * parameters}, pool {pages} (8 pages of 16 tokens)" in memory
    assert re.fullmatch(r"engine ready in \d+\.\d s \(read config \S+, read weights \S+\)", ready)
    engine.close()


def test_the_start_tells_what_workspaces_take_of_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """FR-36: whatever is neither base nor pool."""
    plan: Any = SimpleNamespace(
        pages=SimpleNamespace(bytes=100, tokens=16), config=SimpleNamespace(host_cache_bytes=7)
    )
    weights: Any = SimpleNamespace(num_bytes=1000)
    with caplog.at_level("INFO", "engine.building"):
        _log_memory(plan, weights, num_pages=5, taken=1700)
    assert caplog.messages == [
        "memory in bytes: base 1000, pool 500 (5 pages of 16 tokens), workspaces 200, host cache at most 7"
    ]


def _tensors(base: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(base / "model.safetensors").values())


FRACTION = 0.1
SPARE_BYTES = 256 << 20  # for what CUDA loads when it is first used, as cuBLAS's kernels are


class OnGpu:
    """An engine whose pool was measured, and what it took of the GPU."""

    def __init__(self, path: Path) -> None:
        # wide, so that a step's buffers are far larger than SPARE_BYTES
        self.base = make_llama(path / "base", hidden_size=256, intermediate_size=8192, head_dim=64)
        torch.zeros(1, device="cuda")  # the context is not the engine's
        self.free, self.total = torch.cuda.mem_get_info()
        self.engine = Engine(self.config(gpu_memory_fraction=FRACTION))
        self.names: list[str | None] = [None]
        for rank in (1, 8, 24, 64):
            adapter = make_adapter(self.base, path / f"r{rank}", rank=rank, targets=ALL_LINEAR, seed=rank)
            self.engine.load_adapter(f"r{rank}", str(adapter))
            self.names.append(f"r{rank}")

    def config(self, **settings: Any) -> EngineConfig:
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 32768, "max_rank": 64}
        return EngineConfig(model=str(self.base), device="cuda", **sizes | settings)

    def serve(self, seed: int, num_requests: int, max_prompt: int) -> None:
        """Prompts, adapters and all kinds of sampling, mixed at random."""
        rng = random.Random(seed)
        prompts = [
            [rng.randrange(256) for _ in range(rng.randint(1, max_prompt))] for _ in range(num_requests)
        ]
        params = [_draw_params(rng) for _ in prompts]
        names = [rng.choice(self.names) for _ in prompts]
        outputs = self.engine.generate(prompts, params, names)
        assert all(output.finish_reason == "length" for output in outputs)


def _draw_params(rng: random.Random) -> SamplingParams:
    filters: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.05}, {}]
    edits: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
        {"logit_bias": {1: 2.0}},
    ]
    logprobs = rng.choice([None, 0, 3])
    settings = {**rng.choice(filters), **rng.choice(edits)}
    return SamplingParams(
        max_tokens=rng.randint(1, 40), ignore_eos=True, seed=rng.randrange(99), logprobs=logprobs, **settings
    )


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnGpu]:
    on_gpu = OnGpu(tmp_path_factory.mktemp("gpu"))
    yield on_gpu
    on_gpu.engine.close()


@pytest.mark.gpu
def test_the_engine_takes_its_part_of_the_gpu(on_gpu: OnGpu) -> None:
    taken = on_gpu.free - torch.cuda.mem_get_info()[0]
    assert (FRACTION - 0.01) * on_gpu.total < taken < (FRACTION + 0.01) * on_gpu.total


@pytest.mark.gpu
def test_no_kernel_is_compiled_while_serving(on_gpu: OnGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[str] = []

    def record(*, repr: str, **details: Any) -> None:  # noqa: A002  triton's name for it
        compiled.append(repr)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    for seed, (num_requests, max_prompt) in enumerate([(1, 1), (3, 40), (64, 30), (17, 400), (90, 200)]):
        on_gpu.serve(seed, num_requests, max_prompt)
    assert compiled == []


@pytest.mark.gpu
def test_memory_cannot_run_out_while_serving(on_gpu: OnGpu) -> None:
    with all_but(SPARE_BYTES):
        for seed in range(3):
            on_gpu.serve(seed, num_requests=100, max_prompt=450)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{"pool_bytes": 1 << 40}, {"num_pages": 1 << 30}, {"gpu_memory_fraction": 1e-4}]
)
def test_too_little_gpu_memory_names_the_option(on_gpu: OnGpu, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Engine(on_gpu.config(**settings))
    assert caught.value.param == next(iter(settings))


@pytest.mark.gpu
def test_a_gpu_that_others_use_is_told_before_anything_is_read(on_gpu: OnGpu) -> None:
    with all_but(SPARE_BYTES), pytest.raises(InvalidRequest, match="are free") as caught:
        Engine(on_gpu.config())
    assert caught.value.param == "gpu_memory_fraction"


@contextmanager
def all_but(num_bytes: int) -> Iterator[None]:
    """Somebody else has the free memory: not PyTorch, which would give up what the engine left in it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_uint64()
    size = torch.cuda.mem_get_info()[0] - num_bytes
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    try:
        yield
    finally:
        assert cuda.cuMemFree_v2(address) == 0


def test_auto_shards_adapters_fully_where_only_that_fits(tmp_path: Path) -> None:
    spec = load_model_spec(str(make_llama(tmp_path / "base")))
    settings: dict[str, Any] = {
        "model": spec.path, "tensor_parallel_size": 2, "max_num_seqs": 4, "typical_rank": 64, "max_rank": 64,
        "max_model_len": 16,
    }  # fmt: skip
    batch = Batch(rows=4, rank=64, context=16)
    whole, cut = (GroupCost.of(spec.shape, 2, s, 4).pool_bytes(batch) for s in ("replicate", "full"))
    assert cut < whole - 8192
    for pool_bytes, expected in ((2 * whole, "replicate"), (whole - 1, "full"), (cut // 2, "replicate")):
        config = EngineConfig(pool_bytes=pool_bytes, **settings)
        assert decide_lora_sharding(config, spec) == expected
    asked = EngineConfig(pool_bytes=2 * whole, lora_sharding="full", **settings)
    assert decide_lora_sharding(asked, spec) == "full"


def test_auto_counts_on_what_the_base_leaves_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_model_spec(str(make_llama(tmp_path / "base")))
    config = EngineConfig(
        spec.path, device="cuda", tensor_parallel_size=2, max_num_seqs=4, typical_rank=64, max_rank=64,
        max_model_len=16, gpu_memory_fraction=1.0,
    )  # fmt: skip
    cost = GroupCost.of(spec.shape, 2, "replicate", 2)
    embedding = 2 * spec.shape.vocab_size * spec.shape.hidden_size
    needed = cost.base_bytes + embedding + cost.pool_bytes(Batch(rows=4, rank=64, context=16))
    for total, expected in ((needed, "replicate"), (needed - 1, "full")):
        gpu = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        assert decide_lora_sharding(config, spec) == expected


@pytest.mark.parametrize(
    ("num_gpus", "can_access", "rank_address", "expected"),
    [
        (2, True, None, "full"),
        (2, False, None, "replicate"),
        (1, True, None, "replicate"),
        (2, True, "10.0.0.1:7000", "replicate"),
    ],
)
def test_auto_counts_on_memory_that_gpus_share(
    tmp_path: Path,
    num_gpus: int,
    can_access: bool,
    rank_address: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without that an exchange takes longer than what a fully sharded adapter spares."""
    tiny = load_model_spec(str(make_llama(tmp_path / "base")))
    spec = replace(tiny, shape=LLAMA_8B, max_position_embeddings=2048)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: can_access)
    config = EngineConfig(
        spec.path, device="cuda", tensor_parallel_size=2, max_model_len=1024, pool_bytes=100 << 30,
        max_num_seqs=64, max_adapters=64, rank_address=rank_address,
    )  # fmt: skip
    assert decide_lora_sharding(config, spec) == expected
