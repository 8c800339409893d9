"""Builds an engine: base weights, page pool, adapter loader, core. Needs torch; the core does not."""

from __future__ import annotations

import logging
import time
from functools import partial

import torch

from engine.adapters.loader import AdapterLoader
from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.core import EngineCore, Geometry
from engine.errors import InvalidRequest
from engine.loop import Inbox
from engine.model.loading import LlamaWeights, load_weights
from engine.model.spec import ModelSpec, load_model_spec
from engine.runner.base import Runner
from engine.runner.cpu import CpuRunner

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_core(config: EngineConfig, inbox: Inbox) -> EngineCore:
    """Loads end in `inbox`. Raises InvalidRequest for a model or a configuration that cannot be served."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("this machine has no CUDA device", param="device")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    started = time.monotonic()
    spec = load_model_spec(config.model)
    dtype = _dtype(config)
    geometry = plan_geometry(config, spec, dtype)
    weights = load_weights(spec, dtype, config.device)
    runner = _runner(config, spec, weights, geometry)
    core: EngineCore
    page_elems = spec.shape.page_elems(geometry.page_tokens)
    # the core is built after its loader, but no load can end before somebody asks for one
    loader = AdapterLoader(
        spec.shape, page_elems, dtype, config, lambda result: inbox.put(partial(core.on_loaded, result))
    )
    manager = AdapterManager(loader, config.host_cache_bytes, config.max_parallel_loads)
    core = EngineCore(config, geometry, runner, manager, time.monotonic)
    logger.info(
        "engine ready in %.1f s: pool of %d pages x %d bytes (%d tokens each), host cache of %d bytes",
        time.monotonic() - started,
        geometry.num_pages,
        geometry.page_bytes,
        geometry.page_tokens,
        config.host_cache_bytes,
    )
    return core


def _dtype(config: EngineConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


def _runner(config: EngineConfig, spec: ModelSpec, weights: LlamaWeights, geometry: Geometry) -> Runner:
    sizes = (geometry.num_pages, geometry.page_tokens, geometry.max_model_len)
    if config.device == "cpu":
        return CpuRunner(spec, weights, *sizes, poison=config.debug)
    # triton takes a second to import, and the CPU backend needs it not
    from engine.runner.cuda import CudaRunner

    runner = CudaRunner(spec, weights, config, *sizes)
    runner.warm_up()
    return runner


def plan_geometry(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> Geometry:
    page_tokens = spec.shape.fit_page_tokens(config.page_tokens)
    page_bytes = spec.shape.page_elems(page_tokens) * dtype.itemsize
    num_pages = config.num_pages or config.pool_bytes // page_bytes
    if num_pages < 1:
        raise InvalidRequest(
            f"pool_bytes is {config.pool_bytes}, but one page of this model takes {page_bytes}",
            param="pool_bytes",
        )
    max_model_len = min(config.max_model_len or spec.max_position_embeddings, num_pages * page_tokens)
    if max_model_len > spec.max_position_embeddings:
        raise InvalidRequest(
            f"max_model_len is {max_model_len}, but the model has {spec.max_position_embeddings} positions",
            param="max_model_len",
        )
    return Geometry(
        num_pages=num_pages,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        max_model_len=max_model_len,
        vocab_size=spec.shape.vocab_size,
        eos_token_ids=spec.eos_token_ids,
    )
