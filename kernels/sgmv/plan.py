"""Which tiles the kernels work on, by how many tokens a step may have. Ints only: no torch, no batch.

Chosen by measurement on an H200 (`kernels.sgmv.bench`). A captured graph cannot know the mix of adapters it
will serve, so one plan serves every mix of up to `max_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kernels.linear.tiles import has_tile
from kernels.sgmv.table import RANK_BLOCK


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """A unit of work is (row block, group of (slice, rank block) pairs, part of K)."""

    rows: int  # tokens that share one read of A
    rank_blocks: int  # of one adapter, in an item of the list
    max_group: int  # pairs of one item that are side by side in one product, so that x is read once
    block_k: int
    min_chunks: int  # of block_k; the sums over at least these leave for a plane of partial sums
    max_splits: int  # planes, all of which the expand reads again for each of its tiles
    num_warps: int
    num_stages: int

    def group(self, slices: int) -> int:
        """A power of two."""
        return min(self.max_group, 1 << (slices * self.rank_blocks - 1).bit_length())

    def num_units(self, slices: int, in_features: int) -> int:
        """Of one item, as many as its rank blocks may need."""
        return -(-slices * self.rank_blocks // self.group(slices)) * self.num_splits(in_features)

    def num_chunks(self, in_features: int) -> int:
        return max(self.min_chunks, -(-in_features // (self.block_k * self.max_splits)))

    def num_splits(self, in_features: int) -> int:
        return -(-in_features // (self.block_k * self.num_chunks(in_features)))


@dataclass(frozen=True, slots=True)
class ExpandTile:
    """A unit of work is (row block, tiles of columns in one slice)."""

    rows: int  # tokens that share one read of B
    columns: int
    tiles: int  # one after the other
    num_warps: int

    def num_units(self, widths: Sequence[int]) -> int:
        """Of one row block."""
        return sum(-(-width // (self.columns * self.tiles)) for width in widths)


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    kind: Literal["decode", "prefill"]
    max_tokens: int
    max_segments: int
    max_rank: int
    shrink: ShrinkTile
    expand: ExpandTile
    gated: ExpandTile  # of the expand that ends in silu * mul, in prefill; rows as in `expand`

    @property
    def rank_blocks(self) -> int:
        """Of the largest adapter that may come."""
        return -(-self.max_rank // RANK_BLOCK)

    @property
    def max_items(self) -> int:
        """Row blocks x groups of rank blocks that the shrink may have to walk."""
        return self._max_row_blocks(self.shrink.rows) * -(-self.rank_blocks // self.shrink.rank_blocks)

    @property
    def max_blocks(self) -> int:
        """Row blocks that the expand may have to walk."""
        return self._max_row_blocks(self.expand.rows)

    def _max_row_blocks(self, rows: int) -> int:
        """Every segment may end in a block that is not full, but a block has a token at least."""
        return min(self.max_tokens, self.max_tokens // rows + self.max_segments)


def decode_plan(max_tokens: int, max_rank: int) -> SgmvPlan:
    """Any mix of up to `max_tokens` tokens, each with an adapter of its own if need be."""
    shrink = ShrinkTile(
        rows=8,
        rank_blocks=1,
        max_group=1,
        block_k=256,
        min_chunks=4,
        max_splits=16,
        num_warps=4,
        # All chunks are on their way at once. There is no room for the 48 KiB of that beside a base product
        # of our own with 64 rows; there is for the 24 KiB of three stages.
        num_stages=3 if has_tile(max_tokens) else 5,
    )
    expand = ExpandTile(rows=4, columns=512, tiles=1, num_warps=2)
    return SgmvPlan("decode", max_tokens, max_tokens, max_rank, shrink, expand, expand)


def prefill_plan(max_tokens: int, max_segments: int, max_rank: int) -> SgmvPlan:
    """Long segments, where the arithmetic and the passes over x and y count."""
    rank_blocks = -(-max_rank // RANK_BLOCK)
    shrink = ShrinkTile(
        rows=64,
        rank_blocks=min(4, 1 << (rank_blocks - 1).bit_length()),
        max_group=4,
        block_k=64,
        min_chunks=16,
        max_splits=4,
        num_warps=4,
        num_stages=5,
    )
    expand = ExpandTile(rows=32, columns=128, tiles=8, num_warps=4)
    gated = ExpandTile(rows=32, columns=64, tiles=16, num_warps=4)
    return SgmvPlan("prefill", max_tokens, max_segments, max_rank, shrink, expand, gated)
