"""Cuts a step's sequences into splits (decode) and tiles (prefill). See kernels.paged_attention.triton."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT_FIELDS = tl.constexpr(6)  # sequence or -1, row of q, first key, end of keys, split, number of splits
TILE_FIELDS = tl.constexpr(5)  # sequence or -1, row of q, first token in the query, query length, context


# what changes from step to step must not make a new variant of the kernel
@triton.jit(
    do_not_specialize=["num_seqs", "num_units", "num_tiles", "filling_units", "most_units"],
    do_not_specialize_on_alignment=["context_lens_ptr", "cu_query_lens_ptr"],
)
def plan_kernel(
    context_lens_ptr: tl.tensor,
    cu_query_lens_ptr: tl.tensor,
    units_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_units: tl.tensor,
    num_tiles: tl.tensor,
    filling_units: tl.tensor,
    most_units: tl.tensor,
    DECODE_KEYS: tl.constexpr,
    LONG_SPLIT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
) -> None:
    """Every program sums over all sequences and writes its own entries of both lists.

    Splits are short enough for `filling_units` of them to share the work; long decodes are cut further, into
    splits of LONG_SPLIT blocks or more and `most_units` at most, before each sequence rounds up.
    """
    seq = tl.arange(0, BLOCK_SEQS)
    is_seq = seq < num_seqs
    context = tl.load(context_lens_ptr + seq, mask=is_seq, other=0).to(tl.int32)
    start = tl.load(cu_query_lens_ptr + seq, mask=is_seq, other=0).to(tl.int32)
    query = tl.load(cu_query_lens_ptr + seq + 1, mask=is_seq, other=0).to(tl.int32) - start
    entry = tl.program_id(0) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)

    blocks = tl.where(query == 1, tl.cdiv(context, DECODE_KEYS), 0)
    total = tl.sum(blocks, axis=0)
    split_blocks = tl.minimum(
        tl.cdiv(total, filling_units), tl.maximum(tl.cdiv(total, most_units), LONG_SPLIT)
    )
    split_blocks = tl.maximum(split_blocks, 1)
    num_splits, _ = _splits(blocks, split_blocks)
    owner, split, _ = _owner(entry, tl.where(query == 1, num_splits, 0), seq, num_seqs)
    listed = (entry < num_units) & (owner >= 0)
    context = tl.load(context_lens_ptr + owner, mask=listed, other=0).to(tl.int32)
    row = tl.load(cu_query_lens_ptr + owner, mask=listed, other=0).to(tl.int32)
    num_splits, blocks_each = _splits(tl.cdiv(context, DECODE_KEYS), split_blocks)
    unit = units_ptr + entry * UNIT_FIELDS
    tl.store(unit, owner, mask=entry < num_units)
    tl.store(unit + 1, row, mask=listed)
    tl.store(unit + 2, split * blocks_each * DECODE_KEYS, mask=listed)
    tl.store(unit + 3, tl.minimum((split + 1) * blocks_each * DECODE_KEYS, context), mask=listed)
    tl.store(unit + 4, split, mask=listed)
    tl.store(unit + 5, num_splits, mask=listed)

    owner, index, count = _owner(entry, tl.where(query > 1, tl.cdiv(query, TILE_TOKENS), 0), seq, num_seqs)
    listed = (entry < num_tiles) & (owner >= 0)
    row = tl.load(cu_query_lens_ptr + owner, mask=listed, other=0).to(tl.int32)
    end = tl.load(cu_query_lens_ptr + owner + 1, mask=listed, other=0).to(tl.int32)
    tile = tiles_ptr + entry * TILE_FIELDS
    tl.store(tile, owner, mask=entry < num_tiles)
    tl.store(tile + 1, row, mask=listed)
    # the last tile of a sequence sees most keys: it starts first
    tl.store(tile + 2, (count - 1 - index) * TILE_TOKENS, mask=listed)
    tl.store(tile + 3, end - row, mask=listed)
    tl.store(tile + 4, tl.load(context_lens_ptr + owner, mask=listed, other=0).to(tl.int32), mask=listed)


@triton.jit
def _splits(blocks: tl.tensor, split_blocks: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Number of splits and blocks of each: at most split_blocks, and as equal as can be."""
    # no context, no blocks: still someone must write the zeros of a padding row
    blocks = tl.maximum(blocks, 1)
    blocks_each = tl.cdiv(blocks, tl.cdiv(blocks, split_blocks))
    return tl.cdiv(blocks, blocks_each), blocks_each


@triton.jit
def _owner(
    entry: tl.tensor, count: tl.tensor, seq: tl.tensor, num_seqs: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Of entries of a list with count[s] for sequence s each: sequence or -1, index in it, its count."""
    ends = tl.cumsum(count, axis=0)
    is_before = (ends[None, :] <= entry[:, None]) & (seq < num_seqs)[None, :]
    owner = tl.sum(is_before.to(tl.int32), axis=1)
    is_owner = seq[None, :] == owner[:, None]
    first = tl.sum(tl.where(is_owner, (ends - count)[None, :], 0), axis=1)
    owner_count = tl.sum(tl.where(is_owner, count[None, :], 0), axis=1)
    return tl.where(owner < num_seqs, owner, -1), entry - first, owner_count
