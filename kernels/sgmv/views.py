"""Adapters by slot as views into the pool, offsets resolved when they become resident: for ops on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

Module = TypeVar("Module")
"""One adapted projection, as an op wants it."""


class SlotViews(Generic[Module]):
    """A page must not change its owner while a slot points at it."""

    def __init__(self, pool: torch.Tensor, widths: Sequence[tuple[int, int]]) -> None:
        """`widths[p]` = (in, out) features of projection p."""
        self._elements = pool.view(-1)
        self._widths = tuple(widths)
        self._slots: dict[int, list[list[Module | None]]] = {}  # slot -> layer -> projection

    def put(self, slot: int, tile_offsets: torch.Tensor, ranks: torch.Tensor, scales: torch.Tensor) -> None:
        """Arguments as in AdapterTable.put."""
        rows = zip(tile_offsets.tolist(), ranks.tolist(), scales.tolist(), strict=True)
        self._slots[slot] = [
            [
                self._module(projection, offsets, rank, scale) if rank else None
                for projection, (offsets, rank, scale) in enumerate(zip(*layer, strict=True))
            ]
            for layer in rows
        ]

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def layer(self, slot: int, layer: int) -> Sequence[Module | None]:
        """By projection; None: the adapter does not touch it."""
        return self._slots[slot][layer]

    def _module(self, projection: int, offsets: list[list[int]], rank: int, scale: float) -> Module:
        """`offsets`: of the blocks of A, and of B."""
        raise NotImplementedError

    def _view(self, offset: int, rows: int, width: int) -> torch.Tensor:
        return self._elements[offset : offset + rows * width].view(rows, width)
