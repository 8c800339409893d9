"""Tiles of the GPU's linears for few rows, and which rows those are. Ints only: no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int  # of x, all in one tile
    columns: int  # of y
    block_k: int
    weight_first: bool  # y^T = W x^T: the tensor cores' 64 rows are then W's, not x's and mostly padding
    num_stages: int

    @property
    def operand_elems(self) -> int:
        """That are in shared memory at once."""
        return (self.rows + self.columns) * self.block_k * self.num_stages


FEW_ROWS = Tile(16, 64, 256, weight_first=True, num_stages=5)
FEW_ROWS_BESIDE = replace(FEW_ROWS, num_stages=4)
"""Leaves room on a multiprocessor for a CTA of a LoRA branch, as those of FULL_ROWS do."""
FULL_ROWS = (
    Tile(64, 32, 256, weight_first=False, num_stages=4),
    Tile(64, 64, 128, weight_first=True, num_stages=5),
    Tile(64, 128, 128, weight_first=False, num_stages=4),
)

MOST_TILE_ROWS = FULL_ROWS[0].rows


def has_tile(num_rows: int) -> bool:
    """cuBLAS is as fast or faster otherwise: at 32 rows by a third."""
    return num_rows <= FEW_ROWS.rows or num_rows == MOST_TILE_ROWS
