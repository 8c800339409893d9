from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.adapters.loading import load_image
from engine.errors import Unavailable
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    PAGE_ELEMS,
    lora_tensors,
    tensor_name,
    unpack,
    write_adapter,
)


class Writer:
    """Replaces the adapter whenever a read of it has begun."""

    def __init__(self, path: Path, times: int) -> None:
        self.path = path
        self.times = times
        self.factor = 1

    def __call__(self) -> None:
        if self.times:
            self.times -= 1
            self.factor += 1
            write_adapter(self.path, {name: t * self.factor for name, t in lora_tensors().items()})


def test_an_adapter_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """FR-22, FR-63."""
    path = write_adapter(tmp_path / "a")
    image = load_image(str(path), BASE_T, PAGE_ELEMS, torch.float32, 256, check=Writer(path, times=1))
    want = lora_tensors()[tensor_name(0, "q_proj", "A")] * 2
    assert torch.equal(unpack(image, BASE_T, 0, "q_proj")["A"], want)


def test_an_adapter_that_never_rests_is_a_503(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    with pytest.raises(Unavailable) as caught:
        load_image(str(path), BASE_T, PAGE_ELEMS, torch.float32, 256, check=Writer(path, times=100))
    assert caught.value.retry_after_s is not None


@pytest.mark.gpu
def test_an_image_for_a_device_is_in_pinned_memory(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    image = load_image(str(path), BASE_T, PAGE_ELEMS, torch.bfloat16, 256, pin_memory=True)
    assert image.pages.is_pinned()
