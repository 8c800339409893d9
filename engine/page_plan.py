"""The pool's pages as model and configuration tell: how large they are, and how many if that is given."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import GIB, EngineConfig
from engine.errors import InvalidRequest
from engine.model.spec import ModelSpec
from engine.sharding import WHOLE, Shard, shard_shape

CPU_POOL_BYTES = 1 * GIB


@dataclass(frozen=True, slots=True)
class PagePlan:
    tokens: int  # a page's
    bytes: int  # a page's
    num_pages: int | None  # None: to be measured
    max_model_len: int  # at most; a pool that is smaller allows less


def plan_pages(config: EngineConfig, spec: ModelSpec, item_bytes: int, shard: Shard = WHOLE) -> PagePlan:
    """`item_bytes`: of the model's dtype. Raises InvalidRequest.

    Tokens a page and number of pages are the same for all ranks of a group, bytes may not be.
    """
    shapes = [shard_shape(spec.shape, Shard(rank, shard.world)).local for rank in range(shard.world)]
    page_tokens = max(shape.fit_page_tokens(config.page_tokens) for shape in shapes)
    all_bytes = [shape.page_elems(page_tokens) * item_bytes for shape in shapes]
    page_bytes = all_bytes[shard.rank]
    num_pages = _given(config, max(all_bytes))
    max_model_len = config.max_model_len or spec.max_position_embeddings
    if max_model_len > spec.max_position_embeddings:
        raise InvalidRequest(
            f"max_model_len is {max_model_len}, but the model has {spec.max_position_embeddings} positions",
            param="max_model_len",
        )
    if num_pages is not None:
        max_model_len = min(max_model_len, num_pages * page_tokens)
    return PagePlan(page_tokens, page_bytes, num_pages, max_model_len)


def _given(config: EngineConfig, page_bytes: int) -> int | None:
    pool_bytes = config.pool_bytes
    if pool_bytes is None and config.device == "cpu":
        pool_bytes = CPU_POOL_BYTES
    if config.num_pages is not None or pool_bytes is None:
        return config.num_pages
    if pool_bytes < page_bytes:
        raise InvalidRequest(
            f"pool_bytes is {pool_bytes}, but one page of this model takes {page_bytes}", param="pool_bytes"
        )
    return pool_bytes // page_bytes
