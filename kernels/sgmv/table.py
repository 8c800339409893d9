"""Where the tiles of resident adapters lie in the pool: integer offsets, ranks and scales per adapter slot.

Knows nothing of who owns a page or when an adapter may leave. A tile is at most RANK_BLOCK rows of
A [rb, in], or of B transposed [rb, out]; contiguous, inside one page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

RANK_BLOCK = 16
ABSENT = -1


class Segment(NamedTuple):
    """Tokens [start, end) of a batch use the adapter in `slot`; -1: none."""

    slot: int
    start: int
    end: int


class ColumnSlice(NamedTuple):
    """Columns [start, end) of a fused output belong to `projection`."""

    projection: int
    start: int
    end: int


class FusedModule(NamedTuple):
    """Projections, consecutive in the table, that share an input and lie side by side in one output."""

    projection: int  # the first
    in_features: int
    widths: tuple[int, ...]  # columns of each

    @classmethod
    def of(cls, in_features: int, slices: Sequence[ColumnSlice]) -> FusedModule:
        first = slices[0]
        assert first.start == 0
        for last, following in itertools.pairwise(slices):
            assert (following.projection, following.start) == (last.projection + 1, last.end)
        return cls(first.projection, in_features, tuple(end - start for _, start, end in slices))


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """One row a slot; rows change in place, so that a captured graph sees them."""

    tile_offsets: torch.Tensor  # int64 [slots, layers, projections, A|B, rank blocks], from the pool's base
    ranks: torch.Tensor  # int32 [slots, layers, projections], 0: module absent
    scales: torch.Tensor  # float32 [slots, layers, projections]

    @classmethod
    def empty(
        cls,
        num_slots: int,
        num_layers: int,
        num_projections: int,
        max_rank: int,
        device: torch.device | str = "cpu",
    ) -> AdapterTable:
        modules = (num_slots, num_layers, num_projections)
        num_blocks = -(-max_rank // RANK_BLOCK)
        return cls(
            torch.full((*modules, 2, num_blocks), ABSENT, dtype=torch.int64, device=device),
            torch.zeros(modules, dtype=torch.int32, device=device),
            torch.zeros(modules, dtype=torch.float32, device=device),
        )

    def put(self, slot: int, tile_offsets: torch.Tensor, ranks: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill a slot. `tile_offsets` are absolute and may have fewer rank blocks than the table."""
        self.clear(slot)
        self.tile_offsets[slot, ..., : tile_offsets.shape[-1]].copy_(tile_offsets)
        self.ranks[slot].copy_(ranks)
        self.scales[slot].copy_(scales)

    def clear(self, slot: int) -> None:
        self.tile_offsets[slot].fill_(ABSENT)
        self.ranks[slot].zero_()
        self.scales[slot].zero_()


def absolute_offsets(image_offsets: torch.Tensor, page_ids: Sequence[int], page_elems: int) -> torch.Tensor:
    """Offsets inside an adapter's own pages -> offsets from the pool's base; -1 stays -1. New tensor.

    The image's page i lies in pool page page_ids[i].
    """
    offsets = image_offsets.numpy()  # a few hundred numbers, in the step loop: a third of PyTorch's time
    pages, inside = np.divmod(offsets.clip(min=0), page_elems)
    absolute = np.array(page_ids, np.int64)[pages] * page_elems + inside
    return torch.from_numpy(np.where(offsets < 0, offsets, absolute))
