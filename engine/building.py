"""Builds an engine: base weights, page pool, adapter loader, core. Needs torch; the core does not."""

from __future__ import annotations

import itertools
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.adapters.host_memory import HostArena
from engine.adapters.image import ImageFormat
from engine.adapters.image_reader import ImageReader, LocalReader
from engine.adapters.loader import AdapterLoader
from engine.adapters.manager import AdapterManager
from engine.config import GIB, EngineConfig
from engine.core import EngineCore, Geometry, build_memory
from engine.dtypes import served_dtype
from engine.errors import InvalidRequest
from engine.loop import Inbox
from engine.model.digest import model_digest
from engine.model.loading import LlamaWeights, load_weights
from engine.model.remote import list_weights
from engine.model.spec import ModelSpec, load_model_spec, local_spec
from engine.page_plan import PagePlan, plan_pages
from engine.runner.base import Runner
from engine.runner.cpu import CpuRunner
from engine.sharding import WHOLE, Shard, shard_shape
from engine.stopwatch import Stopwatch
from engine.tensor_parallel.comm import ALONE, Comm, Ranks, join, leave
from engine.tensor_parallel.costs import (
    LOCAL_CPUS,
    NCCL,
    NVLINK,
    Batch,
    GroupCost,
    Machine,
    Sharding,
    choose_sharding,
)
from engine.tensor_parallel.group import Group, GroupReader, GroupRunner, OnEnd
from kernels.gpu import MIN_CAPABILITY
from kernels.sgmv import Split

logger = logging.getLogger(__name__)

MAX_RESERVED_BYTES = 4 * GIB
"""Of the host cache, locked for the GPU when the engine starts: later, launches may wait for that."""

TYPICAL_CONTEXT = 1024  # tokens of a request, where adapters and KV are weighed up


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """What a rank has of an engine, ready to run steps."""

    runner: Runner
    geometry: Geometry
    form: ImageFormat  # of this rank's part of adapters


def build_core(
    config: EngineConfig,
    inbox: Inbox,
    reader: ImageReader | None = None,
    on_group_end: OnEnd = lambda failure: os._exit(1),
) -> EngineCore:
    """Loads end in `inbox`. `reader`: of adapters, closed with the core; None: threads of this process.

    Raises InvalidRequest for a model or a configuration that cannot be served.
    """
    if config.tensor_parallel_size == 1:
        return _core(config, inbox, build_rank(config), None, reader)
    # the other ranks fail as this one does, but this one tells of it
    _check_device(config)
    spec = load_model_spec(config.model)
    shard_shape(spec.shape, Shard(0, config.tensor_parallel_size))
    config = replace(config, lora_sharding=decide_lora_sharding(config, spec))
    group = Group(config, on_group_end)
    try:
        built = build_rank(config, Shard(0, config.tensor_parallel_size), group.rendezvous)
        group.wait_until_ready()
        return _core(config, inbox, built, group, reader)
    except BaseException as error:
        failure = group.find_failure() if isinstance(error, RuntimeError) else None
        group.close()
        leave()
        if failure is not None:
            raise failure from error
        raise


@dataclass(frozen=True, slots=True)
class _RankPlan:
    """What is settled before a rank's runner is built."""

    config: EngineConfig
    spec: ModelSpec  # of the whole model
    dtype: torch.dtype
    pages: PagePlan
    shard: Shard
    comm: Comm
    watch: Stopwatch


def build_rank(config: EngineConfig, shard: Shard = WHOLE, rendezvous: str = "") -> BuiltRank:
    """Of a group, all ranks must be built at the same time; `rendezvous`: where they meet."""
    _check_device(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    plan = _plan_rank(config, shard, rendezvous)
    runner, num_pages = _on_cpu(plan) if config.device == "cpu" else _on_gpu(plan)
    spec, pages = plan.spec, plan.pages
    geometry = Geometry(
        num_pages=num_pages,
        page_tokens=pages.tokens,
        page_bytes=pages.bytes,
        max_model_len=min(pages.max_model_len, num_pages * pages.tokens),
        vocab_size=spec.shape.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        model_digest=model_digest(
            Path(spec.path), list_weights(spec.remote_uri) if spec.remote_uri else None
        ),
    )
    page_elems = shard_shape(spec.shape, shard).local.page_elems(pages.tokens)
    arena = HostArena(page_elems, plan.dtype, is_pinned=config.device == "cuda")
    if config.device == "cuda":
        arena.reserve(min(config.host_cache_bytes, MAX_RESERVED_BYTES))
    form = ImageFormat(
        spec.shape,
        page_elems,
        plan.dtype,
        config.max_rank,
        max_pool_pages=num_pages - 1,  # one at least is left for KV
        max_host_bytes=config.host_cache_bytes,
        arena=arena,
        shard=shard,
        is_fully_sharded=_is_split(config),
    )
    if config.device == "cuda" and config.num_threads is None:
        # a step's CPU ops are tiny, and threads that are called together wait for each other
        torch.set_num_threads(1)
    logger.info("engine ready in %s", plan.watch)
    return BuiltRank(runner, geometry, form)


def _plan_rank(config: EngineConfig, shard: Shard, rendezvous: str) -> _RankPlan:
    watch = Stopwatch()
    with watch.part("read config"):
        spec = load_model_spec(config.model)
    dtype = served_dtype(config)
    pages = plan_pages(config, spec, dtype.itemsize, shard)
    comm: Comm = ALONE
    if shard.world > 1:
        join(shard.rank, shard.world, rendezvous, config.device)
        comm = Ranks([len(shard_shape(spec.shape, Shard(r, shard.world)).vocab) for r in range(shard.world)])
    return _RankPlan(config, spec, dtype, pages, shard, comm, watch)


def _check_device(config: EngineConfig) -> None:
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise InvalidRequest("this machine has no CUDA device", param="device")
    if (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        has, needs = (f"{major}.{minor}" for major, minor in (capability, MIN_CAPABILITY))
        raise InvalidRequest(f"the GPU has compute capability {has}, and {needs} is needed", param="device")


def decide_lora_sharding(config: EngineConfig, spec: ModelSpec) -> Sharding:
    """Of a group; see engine/tensor_parallel/costs.py."""
    if config.lora_sharding != "auto":
        return config.lora_sharding
    num_ranks, item_bytes = config.tensor_parallel_size, served_dtype(config).itemsize
    pages = plan_pages(config, spec, item_bytes, Shard(0, num_ranks))
    batch = Batch(
        rows=min(config.max_num_seqs, config.max_adapters),
        rank=min(config.typical_rank, config.max_rank),
        context=min(TYPICAL_CONTEXT, pages.max_model_len),
    )
    if pages.num_pages is None:
        pool_bytes = _expect_pool_bytes(config, spec, item_bytes)
    else:
        pool_bytes = pages.num_pages * pages.bytes
    sharding = choose_sharding(spec.shape, num_ranks, batch, _machine(config), item_bytes, pool_bytes)
    logger.info("lora_sharding is %s for %s", sharding, batch)
    return sharding


def _machine(config: EngineConfig) -> Machine:
    """As far as rank 0 can know before the others are there."""
    if config.device == "cpu":
        return LOCAL_CPUS
    num_ranks = config.tensor_parallel_size
    are_here = config.rank_address is None and torch.cuda.device_count() >= num_ranks
    pairs = itertools.permutations(range(num_ranks), 2)
    if are_here and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        return NVLINK
    return NCCL


def _expect_pool_bytes(config: EngineConfig, spec: ModelSpec, item_bytes: int) -> int:
    """What the base leaves of a GPU; workspaces are measured when there is a runner."""
    embedding = item_bytes * spec.shape.vocab_size * spec.shape.hidden_size
    base = GroupCost.of(spec.shape, config.tensor_parallel_size, "replicate", item_bytes).base_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    return int(config.gpu_memory_fraction * total) - base - embedding


def _is_split(config: EngineConfig) -> bool:
    return config.tensor_parallel_size > 1 and config.lora_sharding == "full"


def _split(plan: _RankPlan) -> Split | None:
    if not _is_split(plan.config):
        return None
    sharded = shard_shape(plan.spec.shape, plan.shard)
    return Split(plan.shard.rank, plan.shard.world, sharded.by_output, plan.comm)


def _core(
    config: EngineConfig, inbox: Inbox, built: BuiltRank, group: Group | None, reader: ImageReader | None
) -> EngineCore:
    core: EngineCore
    reader = reader or LocalReader(config)
    # the core is built after its loader, but no load can end before somebody asks for one
    loader = AdapterLoader(
        built.form,
        config,
        lambda result: inbox.put(partial(core.on_loaded, result)),
        reader=reader if group is None else GroupReader(group, reader),
    )
    memory = build_memory(config, built.geometry)
    manager = AdapterManager(
        loader, config.host_cache_bytes, config.max_parallel_loads, memory.order.host_image
    )
    runner = built.runner if group is None else GroupRunner(built.runner, group, config.debug)
    core = EngineCore(config, built.geometry, runner, manager, time.monotonic, memory)
    return core


def _on_cpu(plan: _RankPlan) -> tuple[Runner, int]:
    """The runner and its number of pages."""
    pages = plan.pages
    assert pages.num_pages is not None
    with plan.watch.part("read weights"):
        weights = load_weights(plan.spec, plan.dtype, shard=plan.shard, comm=plan.comm)
    _log_memory(plan, weights, pages.num_pages)
    runner = CpuRunner(
        local_spec(plan.spec, plan.shard),
        weights,
        pages.num_pages,
        pages.tokens,
        pages.max_model_len,
        poison=plan.config.debug,
        comm=plan.comm,
        split=_split(plan),
    )
    return runner, pages.num_pages


def _on_gpu(plan: _RankPlan) -> tuple[Runner, int]:
    config, watch = plan.config, plan.watch
    with watch.part("start GPU"):
        # triton takes a second to import, and the CPU backend needs it not
        from engine.runner.cuda_building import GpuMemory, build_cuda_runner, out_of_memory_names

        memory = GpuMemory.now()
    if plan.pages.num_pages is None:
        memory.check(config.gpu_memory_fraction)
    with watch.part("read weights"), out_of_memory_names("model"):
        weights = load_weights(plan.spec, plan.dtype, config.device, plan.shard, plan.comm)
    spec = local_spec(plan.spec, plan.shard)
    runner, num_pages = build_cuda_runner(
        config, spec, weights, plan.pages, memory, watch, plan.comm, _split(plan)
    )
    _log_memory(plan, weights, num_pages, memory.taken)
    return runner, num_pages


def _log_memory(plan: _RankPlan, weights: LlamaWeights, num_pages: int, taken: int | None = None) -> None:
    """`taken`: of the device's memory, by all."""
    base = weights.num_bytes
    pool = num_pages * plan.pages.bytes
    logger.info(
        "memory in bytes: base %d, pool %d (%d pages of %d tokens)%s, host cache at most %d",
        base,
        pool,
        num_pages,
        plan.pages.tokens,
        "" if taken is None else f", workspaces {taken - base - pool}",
        plan.config.host_cache_bytes,
    )
