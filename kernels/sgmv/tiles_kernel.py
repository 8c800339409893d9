"""Where a unit of work finds its tokens and its tile: what the Triton kernels of sgmv share, and `resolve`.

A resolved tile is one int64: its offset in the pool << 5 | its rank rows; 0 where the module has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sgmv.lists import COUNT_SHIFT, FIELDS, HEADER
from kernels.sgmv.table import RANK_BLOCK

RANKS = tl.constexpr(RANK_BLOCK)
_COUNT_SHIFT = tl.constexpr(COUNT_SHIFT)
_FIRST_MASK = tl.constexpr((1 << COUNT_SHIFT) - 1)
_FIELDS = tl.constexpr(FIELDS)
_HEADER = tl.constexpr(HEADER)
_ROWS_BITS = tl.constexpr(5)  # a tile has 0 to 16 rank rows
_ROWS_MASK = tl.constexpr((1 << 5) - 1)


@triton.jit
def resolve_kernel(
    lists_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    a_tiles_ptr: tl.tensor,
    b_tiles_ptr: tl.tensor,
    ITEMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ITEM_RANK_BLOCKS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TABLE_BLOCKS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    BY_OUTPUT: tl.constexpr,
    SHARD: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (module of a layer, part of the list, A or B).

    This is rank SHARD of WORLD. Where BY_OUTPUT has the projection's bit it was dealt rows of A, else of B
    (kernels.sgmv.split).
    """
    projection = tl.program_id(0) % PROJECTIONS
    deals_a = (BY_OUTPUT >> projection & 1) > 0
    items_ptr = lists_ptr + _HEADER
    if tl.program_id(2) == 0:
        _resolve(
            lists_ptr, items_ptr, offsets_ptr, ranks_ptr, a_tiles_ptr, deals_a,
            0, ITEMS, ITEM_RANK_BLOCKS, TABLE_BLOCKS, SHARD, WORLD, BLOCK,
        )  # fmt: skip
    else:
        _resolve(
            lists_ptr + 1, items_ptr + _FIELDS * ITEMS, offsets_ptr, ranks_ptr, b_tiles_ptr, deals_a == 0,
            1, BLOCKS, RANK_BLOCKS, TABLE_BLOCKS, SHARD, WORLD, BLOCK,
        )  # fmt: skip


@triton.jit
def _resolve(
    count_ptr: tl.tensor,
    list_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    is_dealt: tl.tensor,
    SIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TABLE_BLOCKS: tl.constexpr,
    SHARD: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    module = tl.program_id(0)
    tiles_ptr += module.to(tl.int64) * (LENGTH * RANK_BLOCKS)
    num_tiles = tl.load(count_ptr) * RANK_BLOCKS
    for start in range(tl.program_id(1) * BLOCK, num_tiles, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < num_tiles
        entry_ptr = list_ptr + i // RANK_BLOCKS * _FIELDS
        slot = tl.load(entry_ptr + 2, mask=inside, other=0).to(tl.int64)
        rank_blocks = tl.load(entry_ptr + 3, mask=inside, other=0)
        nth = i % RANK_BLOCKS
        block = (rank_blocks & _FIRST_MASK) + nth
        at = slot * tl.num_programs(0) + module
        rank = tl.load(ranks_ptr + at, mask=nth < rank_blocks >> _COUNT_SHIFT, other=0)
        held = tl.where(is_dealt, (rank + (WORLD - 1 - SHARD)) // WORLD, rank)
        rows = tl.maximum(tl.minimum(held - block * RANKS, RANKS), 0)
        offset = tl.load(offsets_ptr + (at * 2 + SIDE) * TABLE_BLOCKS + block, mask=rows > 0, other=0)
        tl.store(tiles_ptr + i, offset << _ROWS_BITS | rows, mask=inside)


@triton.jit
def unpack(
    tile: tl.tensor,
    ALIGN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(offset in the pool, rank rows)"""
    return tl.multiple_of(tile >> _ROWS_BITS, ALIGN), (tile & _ROWS_MASK).to(tl.int32)


@triton.jit
def item_entry(
    lists_ptr: tl.tensor, item: tl.tensor, items: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Of the shrink's list: first token, tokens (0: past the end), first rank block, rank blocks, item."""
    item = tl.minimum(item, items - 1)
    item_ptr = lists_ptr + _HEADER + item * _FIELDS
    rank_blocks = tl.load(item_ptr + 3)
    return (
        tl.load(item_ptr).to(tl.int64),
        tl.load(item_ptr + 1),
        rank_blocks & _FIRST_MASK,
        rank_blocks >> _COUNT_SHIFT,
        item,
    )


@triton.jit
def find_block(
    blocks_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    unit: tl.tensor,
    module: tl.tensor,
    blocks: tl.tensor,
    U0: tl.constexpr,
    U1: tl.constexpr,
    U2: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of an expand's unit: first token, tokens (0: past the end), slot, rank blocks, first tile and where it
    was, slice, which unit of the slice. A row block has U0 + U1 + U2 units in its slices.
    """
    nth = unit % (U0 + U1 + U2)
    slice_ = (nth >= U0).to(tl.int32) + (nth >= U0 + U1).to(tl.int32)
    nth -= tl.where(slice_ == 0, 0, tl.where(slice_ == 1, U0, U0 + U1))
    block = tl.minimum(unit // (U0 + U1 + U2), blocks - 1)
    tile_ptr = tiles_ptr + ((module + slice_).to(tl.int64) * blocks + block) * RANK_BLOCKS
    tile = tl.load(tile_ptr)
    block_ptr = blocks_ptr + block * _FIELDS
    row = tl.load(block_ptr).to(tl.int64)
    rows = tl.load(block_ptr + 1)
    slot = tl.load(block_ptr + 2).to(tl.int64)
    count = tl.load(block_ptr + 3) >> _COUNT_SHIFT
    return row, rows, slot, count, tile, tile_ptr, slice_, nth


@triton.jit
def columns_of(
    slice_: tl.tensor,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(first column, columns) of a slice."""
    width = tl.where(slice_ == 0, N0, tl.where(slice_ == 1, N1, N2))
    first = tl.where(slice_ == 0, 0, tl.where(slice_ == 1, N0, N0 + N1))
    return tl.multiple_of(first, ALIGN), tl.multiple_of(width, ALIGN)
