"""An adapter as the pool holds it: page-sized chunks of host memory, byte for byte what the device gets.

Going to the device is one copy a page. Weights are cast once, here, and here their values are checked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.adapters.binding import BoundModule
from engine.adapters.checkpoint import AdapterCheckpoint
from engine.adapters.host_memory import HostArena, HostPages, PageSource
from engine.adapters.layout import (
    ImageLayout,
    Ranks,
    Tile,
    make_layout,
    num_elements,
    pages_needed,
    too_many_bytes,
    too_many_pages,
)
from engine.adapters.safetensors_header import TensorEntry
from engine.errors import AdapterRefused
from engine.shape import NUM_PROJECTIONS, RANK_BLOCK, ModelShape
from engine.sharding import WHOLE, AdapterShard, Shard, shard_adapters

Bits = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
"""A tensor's elements as integers of their size."""

_INTS = {2: torch.int16, 4: torch.int32}
_INFINITIES = {  # as signed and as unsigned integers: of +inf, of -inf
    torch.float32: (0x7F800000, 0xFF800000),
    torch.float16: (0x7C00, 0xFC00),
    torch.bfloat16: (0x7F80, 0xFF80),
}


@dataclass(frozen=True, slots=True, eq=False)
class AdapterImage:
    """A tile is contiguous: some rows of A, [rows, in], or of B transposed, [rows, out]."""

    digest: str
    pages: HostPages  # of the pool's dtype; gaps are zero
    # int64 [layers, projections, A or B, rank blocks]: elements from the start of the first page, as if the
    # others followed it; -1: no such tile
    tile_offsets: torch.Tensor
    ranks: torch.Tensor  # int32 [layers, projections]; 0: not adapted
    scales: torch.Tensor  # float32 [layers, projections]
    report: dict[str, Any]
    chat_template: str | None
    is_from_disk: bool = False  # read from the local copy, not from the source

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return int(self.ranks.max())


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """What images are made for."""

    shape: ModelShape
    page_elems: int  # on this rank
    dtype: torch.dtype
    max_rank: int
    max_pool_pages: int | None = None  # that one adapter can have
    max_host_bytes: int | None = None
    arena: PageSource | None = None  # where images lie; None: each in memory of its own
    shard: Shard = WHOLE  # what of an adapter this image holds
    is_fully_sharded: bool = False

    def check_size(self, modules: Sequence[BoundModule]) -> None:
        """Raises AdapterRefused if their image would be too large. Called before their bytes are read."""
        num_pages = len(plan_image(self, modules).free)
        page_bytes = self.page_elems * self.dtype.itemsize
        if self.max_pool_pages is not None and num_pages > self.max_pool_pages:
            raise too_many_pages(num_pages, self.max_pool_pages, page_bytes)
        if self.max_host_bytes is not None and num_pages * page_bytes > self.max_host_bytes:
            raise too_many_bytes(num_pages * page_bytes, self.max_host_bytes)


def pack(checkpoint: AdapterCheckpoint, form: ImageFormat) -> AdapterImage:
    """Raises AdapterRefused, naming the tensor, for values that are not finite in the image's dtype."""
    shape = form.shape
    plan = plan_image(form, checkpoint.modules)
    arena = form.arena or HostArena(form.page_elems, form.dtype)
    pages = arena.take(len(plan.free))
    fill_pages(checkpoint, plan, pages)
    return AdapterImage(
        digest=checkpoint.digest,
        pages=pages,
        tile_offsets=plan.tile_offsets,
        ranks=plan.ranks,
        scales=_module_table(
            shape, torch.float32, {(m.layer, m.projection): m.scale for m in checkpoint.modules}
        ),
        report=_report(checkpoint, plan.num_elements * form.dtype.itemsize, len(pages)),
        chat_template=checkpoint.chat_template,
    )


def fill_pages(checkpoint: AdapterCheckpoint, plan: ImagePlan, pages: HostPages) -> None:
    """Raises as `pack`. PyTorch casts; numpy moves the elements, as integers: it transposes twice as fast."""
    for page, free in zip(pages, plan.free, strict=True):
        page[len(page) - free :] = 0
    dtype, page_elems = pages[0].dtype, len(pages[0])
    elements = [_bits(page) for page in pages]
    by_arrival = sorted(checkpoint.modules, key=lambda m: max(m.lora_a.stop, m.lora_b.stop))
    for module in by_arrival:
        for side, entry in enumerate((module.lora_a, module.lora_b)):
            tensor = _part(checkpoint.tensor(entry), plan.part, module, side)
            if tensor.numel() == 0:
                continue
            source = _bits(tensor.to(dtype))
            if not _are_finite(source, dtype):
                raise _not_finite(entry, tensor, dtype)
            for tile, rows in zip(
                plan.tiles[module.layer, module.projection, side], _blocks(source, side), strict=True
            ):
                number, start = divmod(tile.offset, page_elems)
                np.copyto(elements[number][start : start + rows.size].reshape(rows.shape), rows)


def _part(tensor: torch.Tensor, part: AdapterShard, module: BoundModule, side: int) -> torch.Tensor:
    """What this rank holds of A [rank, in] or of B [out, rank]."""
    rows = part.rows(module.projection, side, module.rank)
    features = part.features(module.projection, side)
    first, second = (rows, features) if side == 0 else (features, rows)
    return tensor[first.start : first.stop : first.step, second.start : second.stop : second.step]


def _blocks(source: Bits, side: int) -> Iterator[Bits]:
    """Some rows each of A [rank, in] or of B transposed, [rank, out]."""
    rank = source.shape[side]
    for row in range(0, rank, RANK_BLOCK):
        if side == 0:
            yield source[row : row + RANK_BLOCK]
        else:
            columns = source[:, row : row + RANK_BLOCK]
            # if their rows lie far apart, bring them together before they are transposed
            yield (columns if rank <= 2 * RANK_BLOCK else np.ascontiguousarray(columns)).T


def _are_finite(bits: Bits, dtype: torch.dtype) -> bool:
    """In each half, that of the positive numbers and that of the negative, infinity and NaN come last."""
    unsigned = bits.view(f"u{bits.itemsize}")
    positive, negative = _INFINITIES[dtype]
    return bool(bits.max() < positive and unsigned.max() < negative)


def _bits(tensor: torch.Tensor) -> Bits:
    return tensor.view(_INTS[tensor.dtype.itemsize]).numpy()


@dataclass(frozen=True, slots=True, eq=False)
class ImagePlan:
    """What depends on ranks only; most adapters of a fleet share theirs."""

    part: AdapterShard
    tiles: Mapping[tuple[int, int, int], Sequence[Tile]]  # (layer, projection, side) -> by block
    free: tuple[int, ...]  # as in ImageLayout
    num_elements: int
    tile_offsets: torch.Tensor
    ranks: torch.Tensor


def plan_image(form: ImageFormat, modules: Sequence[BoundModule]) -> ImagePlan:
    ranks = tuple((m.layer, m.projection, m.rank) for m in modules)
    return _make_plan(form.shape, form.shard, form.is_fully_sharded, form.page_elems, ranks)


@functools.lru_cache(maxsize=32)
def _make_plan(
    full: ModelShape,
    shard: Shard,
    is_fully_sharded: bool,
    page_elems: int,
    modules: tuple[tuple[int, int, int], ...],
) -> ImagePlan:
    """`modules`: (layer, projection, rank) of each."""
    ranks = {(layer, projection): rank for layer, projection, rank in modules}
    part = shard_adapters(full, shard, is_fully_sharded)
    shape = part.sharded.local
    layout = make_layout(shape, ranks, page_elems, part.num_rows)
    # the scheduler counts the same pages for all ranks
    page_tokens = page_elems // shape.page_elems(1)
    num_pages = max(layout.num_pages, _most_pages(part, page_tokens, ranks))
    tiles: dict[tuple[int, int, int], list[Tile]] = {}
    for tile in sorted(layout.tiles):
        tiles.setdefault((tile.layer, tile.projection, tile.side), []).append(tile)
    return ImagePlan(
        part,
        tiles,
        layout.free + (page_elems,) * (num_pages - layout.num_pages),
        num_elements(shape, ranks, part.num_rows),
        _tile_offsets(layout, shape.num_layers),
        _module_table(shape, torch.int32, ranks),
    )


def _most_pages(part: AdapterShard, page_tokens: int, ranks: Ranks) -> int:
    """Of the other ranks; 0 if they are all like this one."""
    full, shard = part.sharded.full, part.sharded.shard
    others = {}
    for rank in range(shard.world):
        other = shard_adapters(full, Shard(rank, shard.world), part.is_full)
        # without cut ranks, those of the same shape hold as much
        others[other.sharded.local, rank if part.is_full else 0] = other
    others.pop((part.sharded.local, shard.rank if part.is_full else 0))
    pages = (
        pages_needed(shape, ranks, shape.page_elems(page_tokens), other.num_rows)
        for (shape, _), other in others.items()
    )
    return max(pages, default=0)


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
    table[tuple(torch.tensor(list(values)).T)] = torch.tensor(list(values.values()), dtype=dtype)
    return table


def _not_finite(entry: TensorEntry, tensor: torch.Tensor, dtype: torch.dtype) -> AdapterRefused:
    if not torch.isfinite(tensor).all():
        return AdapterRefused(f"{entry.name} holds values that are not finite", param=entry.name)
    largest = tensor.abs().max().item()
    limit = torch.finfo(dtype).max
    return AdapterRefused(
        f"{entry.name} holds {largest:.4g}, which is not finite as {dtype}: at most {limit:.4g}",
        param=entry.name,
    )


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
