"""A pool full of NaN that adapters are packed into tile by tile, as the loader does, for kernel tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

import torch

from kernels.sgmv import RANK_BLOCK, AdapterTable, AdapterViews


class Lora(NamedTuple):
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]
    scale: float


Modules = Mapping[tuple[int, int], Lora]  # by (layer, projection)


class Packed(NamedTuple):
    tile_offsets: torch.Tensor
    ranks: torch.Tensor
    scales: torch.Tensor


class TilePool:
    def __init__(self, num_pages: int, page_elems: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.pool = torch.full((num_pages, page_elems), torch.nan, dtype=dtype)
        self._pages = list(range(num_pages))
        random.Random(seed).shuffle(self._pages)
        self._page = self._pages.pop()
        self._used = 0

    def take_pages(self, num_pages: int) -> list[int]:
        """Pages that hold no tile."""
        return [self._pages.pop() for _ in range(num_pages)]

    def pack(self, modules: Modules, num_layers: int, num_projections: int) -> Packed:
        max_rank = max((lora.a.shape[0] for lora in modules.values()), default=0)
        num_blocks = max(1, -(-max_rank // RANK_BLOCK))
        table = AdapterTable.empty(1, num_layers, num_projections, num_blocks * RANK_BLOCK)
        for (layer, projection), lora in sorted(modules.items()):
            table.ranks[0, layer, projection] = lora.a.shape[0]
            table.scales[0, layer, projection] = lora.scale
            for ab, rows in enumerate((lora.a, lora.b.T)):
                for block, tile in enumerate(torch.split(rows, RANK_BLOCK)):
                    table.tile_offsets[0, layer, projection, ab, block] = self._write(tile)
        return Packed(table.tile_offsets[0], table.ranks[0], table.scales[0])

    def _write(self, tile: torch.Tensor) -> int:
        page_elems = self.pool.shape[1]
        if self._used + tile.numel() > page_elems:
            self._page, self._used = self._pages.pop(), 0
        offset = self._page * page_elems + self._used
        self.pool.view(-1)[offset : offset + tile.numel()] = tile.flatten()
        self._used += tile.numel()
        return offset


def random_lora(rank: int, in_features: int, out_features: int, generator: torch.Generator) -> Lora:
    """Unit-size deltas for unit-size inputs, at any rank."""
    a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
    b = torch.randn(out_features, rank, generator=generator) * rank**-0.5
    return Lora(a, b, float(torch.rand((), generator=generator)) + 0.5)


def put_everywhere(slot: int, packed: Packed, table: AdapterTable, views: AdapterViews) -> None:
    table.put(slot, *packed)
    views.put(slot, *packed)
