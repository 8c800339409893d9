"""Configuration of one engine replica. Checked once; never mutated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from engine.eviction import Policy as EvictionPolicy

GIB = 1 << 30
MIN_TIMEOUT_S = 1.5  # an engine that has nothing to do looks around, and gives a sign of life, once a second
DEFAULT_PARALLEL_LOADS = 4  # what routers, who do not know a replica's configuration, take it to be

Device = Literal["cpu", "cuda"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Fairness = Literal["tokens", "arrival"]
LoraSharding = Literal["auto", "replicate", "full"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str  # directory, hub id or s3://bucket/prefix
    device: Device = "cpu"
    dtype: Dtype = "auto"  # auto: float32 on cpu, bfloat16 on cuda
    max_model_len: int | None = None  # tokens, prompt + output; None: what the model and the pool allow
    page_tokens: int = 16  # doubled until the largest adapter tile fits a page
    num_pages: int | None = None  # exact pool size; wins over pool_bytes
    pool_bytes: int | None = None  # None: 1 GiB on cpu; on cuda what gpu_memory_fraction leaves
    gpu_memory_fraction: float = 0.92  # of the whole GPU: base, workspaces and a pool of no given size
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512  # per step, prefill and decode together
    max_queued_requests: int = 1024
    prefix_cache: bool = True
    max_adapters: int = 64  # adapter slots: how many can be resident at once if the pool has room
    max_rank: int = 256
    host_cache_bytes: int = 2 * GIB
    max_parallel_loads: int = DEFAULT_PARALLEL_LOADS
    load_timeout_s: float = 60.0
    disk_cache_dir: str | None = None  # local directory for what was read from S3; None: not kept on disk
    disk_cache_bytes: int = 20 * GIB
    max_overtakes: int = 32  # admissions past a request that waits for pages or for a slot
    max_overtaken_s: float = 2.0
    fairness: Fairness = "tokens"  # who starts next: the adapter that was given least, or the oldest request
    eviction_policy: EvictionPolicy = "score"  # of adapters and prefix pages, in the pool and in host memory
    prefetch: bool = True  # adapters from host memory to free pages of the pool, before anybody asks for them
    pinned_adapters: tuple[str, ...] = ()  # names; never evicted from the pool once they are there
    tensor_parallel_size: int = 1  # ranks of this replica's group, each with a part of base and adapters
    rank_address: str | None = None  # host:port to which a group's other ranks connect; None: it starts them
    lora_sharding: LoraSharding = "auto"  # a group's adapters: one side of A and B whole on each rank, or 1/N
    typical_rank: int = 16  # that most adapters have, for "auto": see engine/tensor_parallel/costs.py
    step_timeout_s: float = 60.0  # an engine whose step takes longer is over
    heartbeat_timeout_s: float = 10.0  # so is an engine process that gives no sign of life
    num_threads: int | None = None  # of PyTorch; None: its default on cpu, one on cuda
    debug: bool = False  # check invariants every step and fill freed pages with NaN

    def __post_init__(self) -> None:
        """Raises ValueError, which names the field."""
        for name, choices in (
            ("device", get_args(Device)),
            ("dtype", get_args(Dtype)),
            ("fairness", get_args(Fairness)),
            ("eviction_policy", get_args(EvictionPolicy)),
            ("lora_sharding", get_args(LoraSharding)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        for name in (
            "page_tokens", "max_num_seqs", "max_num_batched_tokens", "max_queued_requests",
            "max_adapters", "max_rank", "host_cache_bytes", "max_parallel_loads", "load_timeout_s",
            "disk_cache_bytes", "tensor_parallel_size", "typical_rank",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("step_timeout_s", "heartbeat_timeout_s"):
            if getattr(self, name) < MIN_TIMEOUT_S:
                raise ValueError(f"{name} must be at least {MIN_TIMEOUT_S}, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request decodes one token a step"
            )
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(
                f"gpu_memory_fraction must be above 0 and at most 1, got {self.gpu_memory_fraction}"
            )
        for name in ("max_model_len", "num_pages", "pool_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("max_overtakes", "max_overtaken_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
