from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from engine.adapters.checkpoint import start_checkpoint
from engine.adapters.image import ImageFormat, pack
from engine.adapters.source import describe, open_reader, read_adapter_files
from engine.errors import AdapterRefused
from engine.shape import PROJECTIONS
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    CONFIG,
    LLAMA_8B,
    PAGE_ELEMS,
    Tensors,
    all_elements,
    fill,
    load,
    lora_tensors,
    tensor_name,
    unpack,
    write_adapter,
)

MIXED_RANKS = dict(zip(PROJECTIONS, (1, 64, 7, 16, 17, 40, 33), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_hold_a_and_b_exactly_for_mixed_ranks(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors: Tensors = {}
    for projection, rank in MIXED_RANKS.items():
        tensors |= lora_tensors(rank=rank, projections=[projection])
    path = write_adapter(tmp_path / "a", tensors, {**CONFIG, "rank_pattern": MIXED_RANKS})
    image = load(path, dtype=dtype)
    for layer in range(BASE_T.num_layers):
        assert image.ranks[layer].tolist() == list(MIXED_RANKS.values())
        for projection in PROJECTIONS:
            for side, got in unpack(image, BASE_T, layer, projection).items():
                assert torch.equal(got, tensors[tensor_name(layer, projection, side)].to(dtype))
    assert image.rank == 64
    assert image.tile_offsets.shape == (2, 7, 2, 4)
    assert image.nbytes == image.num_pages * PAGE_ELEMS * dtype.itemsize


def test_tables_have_the_types_that_kernels_read(tmp_path: Path) -> None:
    image = load(write_adapter(tmp_path / "a"))
    assert image.tile_offsets.dtype == torch.int64
    assert image.ranks.dtype == torch.int32
    assert image.scales.dtype == torch.float32
    assert [page.shape for page in image.pages] == [(PAGE_ELEMS,)] * image.num_pages


def test_what_no_tile_covers_is_zero(tmp_path: Path) -> None:
    """FR-25: gaps carry nothing of an earlier owner."""
    image = load(write_adapter(tmp_path / "a"), page_elems=PAGE_ELEMS + 100)
    elements = all_elements(image)
    covered = torch.zeros_like(elements, dtype=torch.bool)
    for (layer, projection, side, _), offset in zip(
        image.tile_offsets.ne(-1).nonzero().tolist(),
        image.tile_offsets[image.tile_offsets >= 0].tolist(),
        strict=True,
    ):
        covered[offset : offset + 8 * BASE_T.widths(projection)[side]] = True
        assert image.ranks[layer, projection] == 8
    assert (elements[~covered] == 0).all()
    assert (elements[covered] != 0).any()


def test_an_absent_projection_has_no_tile_and_rank_and_scale_zero(tmp_path: Path) -> None:
    """FR-42."""
    image = load(write_adapter(tmp_path / "a", lora_tensors(projections=["q_proj"], layers=[1])))
    assert image.ranks.nonzero().tolist() == [[1, 0]]
    assert image.scales.nonzero().tolist() == [[1, 0]]
    assert image.tile_offsets.ne(-1).nonzero().tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["A", "B"])
def test_one_value_that_is_not_finite_refuses_the_adapter(
    value: float, dtype: torch.dtype, side: str, tmp_path: Path
) -> None:
    """FR-16."""
    tensors = lora_tensors(dtype=dtype)
    name = tensor_name(1, "v_proj", side)
    tensors[name][3, 5] = value
    with pytest.raises(AdapterRefused) as caught:
        load(write_adapter(tmp_path / "a", tensors))
    assert caught.value.param == name
    assert "not finite" in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_and_the_smallest_numbers_are_finite(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = lora_tensors(dtype=dtype)
    name = tensor_name(1, "v_proj", "B")
    limits = torch.finfo(dtype)
    tensors[name][0, :5] = torch.tensor([limits.max, limits.min, limits.smallest_normal, -0.0, 0.0])
    got = unpack(load(write_adapter(tmp_path / "a", tensors), dtype=dtype), BASE_T, 1, "v_proj")["B"]
    assert torch.equal(got, tensors[name])
    assert got[0, 3].signbit()


@pytest.mark.parametrize("value", [7e4, -7e4])
def test_a_value_beyond_the_serving_dtype_refuses_the_adapter(value: float, tmp_path: Path) -> None:
    """FR-19: fp16 would hold infinity."""
    tensors = lora_tensors()
    name = tensor_name(0, "q_proj", "B")
    tensors[name][0, 0] = value
    path = write_adapter(tmp_path / "a", tensors)
    with pytest.raises(AdapterRefused) as caught:
        load(path, dtype=torch.float16)
    assert caught.value.param == name
    assert "7e+04" in caught.value.message
    assert "6.55e+04" in caught.value.message
    load(path, dtype=torch.bfloat16)


def test_tensors_at_odd_offsets_are_read_right(tmp_path: Path) -> None:
    """A file may hold fp32 right behind an odd number of fp16 values."""
    path = write_adapter(tmp_path / "a")
    names = [tensor_name(0, "q_proj", side) for side in "AB"]
    lora_a, lora_b = fill("a", (1, 64), torch.float16), fill("b", (64, 1))
    body = lora_b.numpy().tobytes() + lora_a.numpy().tobytes()
    header = (
        f'{{"{names[1]}": {{"dtype": "F32", "shape": [64, 1], "data_offsets": [0, 256]}},'
        f' "{names[0]}": {{"dtype": "F16", "shape": [1, 64], "data_offsets": [256, 384]}}}}'
    ).encode()
    for padding in range(4):
        text = header + b" " * padding
        file = len(text).to_bytes(8, "little") + text + body
        (path / "adapter_model.safetensors").write_bytes(file)
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
        got = unpack(load(path), BASE_T, 0, "q_proj")
        assert torch.equal(got["A"], lora_a.float())
        assert torch.equal(got["B"], lora_b)


def test_an_8b_rank_16_adapter_is_40_pages_and_packs_quickly(tmp_path: Path) -> None:
    tensors = lora_tensors(LLAMA_8B, rank=16, projections=PROJECTIONS, dtype=torch.bfloat16)
    path = write_adapter(tmp_path / "a", tensors, {**CONFIG, "r": 16})
    checkpoint = start_checkpoint(
        read_adapter_files(open_reader(describe(str(path)))), LLAMA_8B, max_rank=256
    )
    checkpoint.weights.sha256()
    started = time.thread_time()  # of this thread, whatever else runs
    image = pack(checkpoint, ImageFormat(LLAMA_8B, LLAMA_8B.page_elems(16), torch.bfloat16, max_rank=256))
    assert time.thread_time() - started < 1.0  # 80 MiB; some 40 ms where nothing else runs
    assert image.num_pages == 40
    assert image.pages[0].shape == (1 << 20,)
    for projection in PROJECTIONS:
        for side, got in unpack(image, LLAMA_8B, 31, projection).items():
            assert torch.equal(got, tensors[tensor_name(31, projection, side)])
