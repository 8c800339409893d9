"""The arithmetic of the pool's size; what is measured on a real device is in tests.engine.test_building."""

from __future__ import annotations

import pytest
import torch

from engine.errors import InvalidRequest
from engine.runner.cuda_building import GpuMemory, out_of_memory_names

MEMORY = GpuMemory(total=1000, free=950)


def test_the_pool_is_what_all_else_leaves_of_the_fraction() -> None:
    assert MEMORY.num_pages(fraction=0.9, taken=300, page_bytes=100) == 6
    assert MEMORY.num_pages(fraction=0.9, taken=301, page_bytes=100) == 5
    assert MEMORY.num_pages(fraction=0.9, taken=800, page_bytes=100) == 1


def test_a_pool_without_a_page_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"900 of .* 1000 bytes, .* take 801 and one page 100") as caught:
        MEMORY.num_pages(fraction=0.9, taken=801, page_bytes=100)
    assert caught.value.param == "gpu_memory_fraction"


def test_memory_that_others_have_is_not_promised() -> None:
    MEMORY.check(0.95)
    with pytest.raises(InvalidRequest, match=r"960 of .* only 950 are free") as caught:
        MEMORY.check(0.96)
    assert caught.value.param == "gpu_memory_fraction"


def test_running_out_of_memory_names_what_to_change() -> None:
    with (
        pytest.raises(InvalidRequest, match="tried to allocate") as caught,
        out_of_memory_names("pool_bytes"),
    ):
        raise torch.OutOfMemoryError("tried to allocate")
    assert caught.value.param == "pool_bytes"
