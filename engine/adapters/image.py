"""An adapter as the pool holds it: page-sized chunks of host memory, byte for byte what the device gets.

Going to the device is one copy a page. Weights are cast once, here, and here their values are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.adapters.checkpoint import AdapterCheckpoint
from engine.adapters.layout import ImageLayout, Tile, make_layout, num_elements
from engine.adapters.safetensors_header import TensorEntry
from engine.errors import AdapterRefused
from engine.shape import NUM_PROJECTIONS, RANK_BLOCK, ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class AdapterImage:
    """A tile is contiguous: some rows of A, [rows, in], or of B transposed, [rows, out]."""

    digest: str
    pages: torch.Tensor  # [num_pages, page_elems], of the pool's dtype; gaps are zero
    # int64 [layers, projections, A or B, rank blocks]: elements from the start of `pages`, -1: no such tile
    tile_offsets: torch.Tensor
    ranks: torch.Tensor  # int32 [layers, projections]; 0: not adapted
    scales: torch.Tensor  # float32 [layers, projections]
    report: dict[str, Any]
    chat_template: str | None

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return int(self.ranks.max())


def pack(
    checkpoint: AdapterCheckpoint,
    shape: ModelShape,
    page_elems: int,
    dtype: torch.dtype,
    pin_memory: bool = False,
) -> AdapterImage:
    """Raises AdapterRefused, naming the tensor, for values that are not finite in `dtype`."""
    ranks = {(module.layer, module.projection): module.rank for module in checkpoint.modules}
    layout = make_layout(shape, ranks, page_elems)
    pages = torch.empty((layout.num_pages, page_elems), dtype=dtype, pin_memory=pin_memory)
    for page, free in zip(pages, layout.free, strict=True):
        page[page_elems - free :] = 0
    _copy_tiles(checkpoint, layout, pages.view(-1))
    low, high = torch.aminmax(pages)  # NaN wins over any number
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise _not_finite(checkpoint, dtype)
    return AdapterImage(
        digest=checkpoint.digest,
        pages=pages,
        tile_offsets=_tile_offsets(layout, shape.num_layers),
        ranks=_module_table(shape, torch.int32, ranks),
        scales=_module_table(
            shape, torch.float32, {(m.layer, m.projection): m.scale for m in checkpoint.modules}
        ),
        report=_report(checkpoint, num_elements(shape, ranks) * dtype.itemsize, layout.num_pages),
        chat_template=checkpoint.chat_template,
    )


def _copy_tiles(checkpoint: AdapterCheckpoint, layout: ImageLayout, elements: torch.Tensor) -> None:
    tiles: dict[tuple[int, int, int], list[Tile]] = {}
    for tile in layout.tiles:
        tiles.setdefault((tile.layer, tile.projection, tile.side), []).append(tile)
    for module in checkpoint.modules:
        lora_a = checkpoint.tensor(module.lora_a)
        lora_b = checkpoint.tensor(module.lora_b)
        # one block: cast and transpose as it is copied; several: columns are far apart, so not block by block
        lora_b = lora_b.t() if module.rank <= RANK_BLOCK else lora_b.to(elements.dtype).t().contiguous()
        for side, source in enumerate((lora_a, lora_b)):
            for tile in tiles[module.layer, module.projection, side]:
                row = tile.block * RANK_BLOCK
                target = elements[tile.offset : tile.offset + tile.rows * tile.width]
                target.view(tile.rows, tile.width).copy_(source[row : row + tile.rows])


def _tile_offsets(layout: ImageLayout, num_layers: int) -> torch.Tensor:
    num_blocks = max(tile.block for tile in layout.tiles) + 1
    offsets = torch.full((num_layers, NUM_PROJECTIONS, 2, num_blocks), -1, dtype=torch.int64)
    index = torch.tensor([(t.layer, t.projection, t.side, t.block) for t in layout.tiles])
    offsets[tuple(index.T)] = torch.tensor([tile.offset for tile in layout.tiles])
    return offsets


def _module_table(
    shape: ModelShape, dtype: torch.dtype, values: dict[tuple[int, int], int] | dict[tuple[int, int], float]
) -> torch.Tensor:
    table = torch.zeros((shape.num_layers, NUM_PROJECTIONS), dtype=dtype)
    for (layer, projection), value in values.items():
        table[layer, projection] = value
    return table


def _not_finite(checkpoint: AdapterCheckpoint, dtype: torch.dtype) -> AdapterRefused:
    """Say which tensor it is."""
    entries = (entry for module in checkpoint.modules for entry in (module.lora_a, module.lora_b))
    errors = (_check_finite(entry, checkpoint.tensor(entry), dtype) for entry in entries)
    return next(error for error in errors if error is not None)


def _check_finite(entry: TensorEntry, tensor: torch.Tensor, dtype: torch.dtype) -> AdapterRefused | None:
    if not torch.isfinite(tensor).all():
        return AdapterRefused(f"{entry.name} holds values that are not finite", param=entry.name)
    if not torch.isfinite(tensor.to(dtype)).all():
        largest = tensor.abs().max().item()
        limit = torch.finfo(dtype).max
        return AdapterRefused(
            f"{entry.name} holds {largest:.4g}, which is not finite as {dtype}: at most {limit:.4g}",
            param=entry.name,
        )
    return None


def _report(checkpoint: AdapterCheckpoint, num_bytes: int, num_pages: int) -> dict[str, Any]:
    return {
        "status": "ok",
        "adapter": checkpoint.name,
        "digest": checkpoint.digest,
        "rank": max(module.rank for module in checkpoint.modules),
        "bytes": num_bytes,
        "pages": num_pages,
        "bound": 2 * len(checkpoint.modules),
        "present": checkpoint.num_tensors,
        "modules": [{"name": m.name, "rank": m.rank, "scale": m.scale} for m in checkpoint.modules],
        "warnings": list(checkpoint.warnings),
        "chat_template": "base" if checkpoint.chat_template is None else "adapter",
    }
