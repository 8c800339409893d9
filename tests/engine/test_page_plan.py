"""How many pages, and how large: from the model and the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import GIB, EngineConfig
from engine.errors import InvalidRequest
from engine.model.spec import ModelSpec, RopeSpec
from engine.page_plan import PagePlan, plan_pages
from engine.shape import ModelShape

SPEC = ModelSpec(
    "model", ModelShape(32, 4096, 14336, 32, 8, 128, 128256), 1e-5, RopeSpec(1e4), False, 8192, (), 0
)
PAGE_BYTES = 2 << 20  # 32 layers x K and V x 16 tokens x 8 heads x 128 x 2 bytes


def plan(**settings: Any) -> PagePlan:
    return plan_pages(EngineConfig("model", **settings), SPEC, item_bytes=2)


def test_a_page_holds_keys_and_values_of_its_tokens() -> None:
    assert (plan().tokens, plan().bytes) == (16, PAGE_BYTES)


def test_the_cpu_has_a_pool_of_a_gibibyte_unless_told() -> None:
    assert plan().num_pages == GIB // PAGE_BYTES
    assert plan(pool_bytes=3 * PAGE_BYTES + 1).num_pages == 3


def test_the_gpu_measures_unless_told() -> None:
    assert plan(device="cuda") == PagePlan(16, PAGE_BYTES, None, 8192)
    assert plan(device="cuda", pool_bytes=3 * PAGE_BYTES).num_pages == 3


def test_a_number_of_pages_wins() -> None:
    assert plan(num_pages=7, pool_bytes=GIB).num_pages == 7
    assert plan(num_pages=7, pool_bytes=1).num_pages == 7


def test_a_sequence_is_no_longer_than_the_pool() -> None:
    assert plan(num_pages=7).max_model_len == 7 * 16
    assert plan(num_pages=7, max_model_len=100).max_model_len == 100
    assert plan(device="cuda", max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    "settings",
    [{"pool_bytes": PAGE_BYTES - 1}, {"max_model_len": 8193}, {"max_model_len": 8193, "num_pages": 7}],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(**settings)
    assert caught.value.param == next(iter(settings))
