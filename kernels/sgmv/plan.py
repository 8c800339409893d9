"""Which tiles the kernels work on, by how many tokens a step may have. Ints only: no torch, no batch.

Chosen by measurement on an H200 (`kernels.sgmv.bench`). A captured graph cannot know the mix of adapters it
will serve, so one plan serves every mix of up to `max_tokens` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.sgmv.table import RANK_BLOCK


@dataclass(frozen=True, slots=True)
class ShrinkTile:
    """A unit of work is (row block, rank blocks, slice, part of K)."""

    rows: int  # tokens that share one read of A
    rank_blocks: int  # of one adapter, side by side in one product
    block_k: int
    chunks: int  # block_k x chunks of K, then the partial sums leave for a plane
    num_warps: int
    num_stages: int
    single_rows: bool  # row blocks of one token go without tensor cores

    def num_splits(self, in_features: int) -> int:
        return -(-in_features // (self.block_k * self.chunks))


@dataclass(frozen=True, slots=True)
class ExpandTile:
    """A unit of work is (row block, columns of one slice)."""

    rows: int  # tokens that share one read of B
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    max_tokens: int
    max_segments: int
    max_rank: int
    shrink: ShrinkTile
    expand: ExpandTile

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
    if max_tokens == 1:
        shrink = ShrinkTile(16, 1, block_k=256, chunks=2, num_warps=4, num_stages=2, single_rows=True)
    else:
        shrink = ShrinkTile(16, 1, block_k=256, chunks=4, num_warps=4, num_stages=4, single_rows=True)
    expand = ExpandTile(rows=8, columns=256, num_warps=4, num_stages=1)
    return SgmvPlan(max_tokens, max_tokens, max_rank, shrink, expand)


def prefill_plan(max_tokens: int, max_segments: int, max_rank: int) -> SgmvPlan:
    """Long segments, where the product's arithmetic and the passes over x and y count."""
    rank_blocks = min(4, 1 << (-(-max_rank // RANK_BLOCK) - 1).bit_length())
    shrink = ShrinkTile(64, rank_blocks, block_k=128, chunks=16, num_warps=4, num_stages=4, single_rows=False)
    expand = ExpandTile(rows=64, columns=128, num_warps=4, num_stages=1)
    return SgmvPlan(max_tokens, max_segments, max_rank, shrink, expand)
