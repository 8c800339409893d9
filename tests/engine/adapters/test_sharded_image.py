"""What the ranks of a group hold of an adapter: together all of it, in as many pages on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loading import load_image
from engine.shape import NUM_PROJECTIONS, PROJECTIONS, RANK_BLOCK
from engine.sharding import AdapterShard, Shard, shard_adapters
from tests.engine.adapters.adapter_dirs import BASE_T, CONFIG, lora_tensors, tensor_name, write_adapter
from tests.tiny import ALL_LINEAR

WORLD = 4


def load_part(path: Path, rank: int, is_full: bool) -> tuple[AdapterImage, AdapterShard]:
    part = shard_adapters(BASE_T, Shard(rank, WORLD), is_full)
    page_elems = part.sharded.local.page_elems(128)
    form = ImageFormat(
        BASE_T, page_elems, torch.float32, 64, shard=Shard(rank, WORLD), is_fully_sharded=is_full
    )
    return load_image(str(path), form), part


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("adapter_rank", [1, 6, 40])
def test_the_parts_are_the_adapter(tmp_path: Path, adapter_rank: int, is_full: bool) -> None:
    tensors = lora_tensors(rank=adapter_rank, projections=ALL_LINEAR)
    path = write_adapter(tmp_path / "a", tensors, {**CONFIG, "r": adapter_rank, "target_modules": ALL_LINEAR})
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    num_pages = set()
    for rank in range(WORLD):
        image, part = load_part(path, rank, is_full)
        num_pages.add(image.num_pages)
        num_elements = 0
        for projection in range(NUM_PROJECTIONS):
            for layer in range(BASE_T.num_layers):
                for side in (0, 1):
                    held = place(whole, image, part, layer, projection, side, adapter_rank)
                    num_elements += held
        assert image.report["bytes"] == 4 * num_elements
    assert len(num_pages) == 1
    for name, tensor in tensors.items():
        assert torch.equal(whole[name], tensor), name


def place(
    whole: dict[str, torch.Tensor],
    image: AdapterImage,
    part: AdapterShard,
    layer: int,
    projection: int,
    side: int,
    adapter_rank: int,
) -> int:
    """Copy what the image holds of a tensor to where it belongs; how many elements that are."""
    rows = part.rows(projection, side, adapter_rank)
    features = part.features(projection, side)
    elements = torch.cat(list(image.pages))
    name = tensor_name(layer, PROJECTIONS[projection], "AB"[side])
    target = whole[name] if side == 0 else whole[name].T
    for row in range(0, len(rows), RANK_BLOCK):
        offset = int(image.tile_offsets[layer, projection, side, row // RANK_BLOCK])
        num_rows = min(RANK_BLOCK, len(rows) - row)
        tile = elements[offset : offset + num_rows * len(features)].view(num_rows, len(features))
        target[list(rows[row : row + num_rows]), features.start : features.stop] = tile
    return len(rows) * len(features)
