"""One tile of a prefill: some tokens' query heads of one KV head. See kernels.paged_attention.triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_attention.block_kernel import accumulate, block_offsets
from kernels.paged_attention.plan_kernel import TILE_FIELDS


# what changes from step to step must not make a new variant of the kernel
@triton.jit(
    do_not_specialize=["stride_seq"],
    do_not_specialize_on_alignment=["page_table_ptr"],
)
def prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    scale: tl.tensor,
    stride_seq: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Row m of a tile is query head m % GROUP of token m // GROUP. scale includes log2(e)."""
    tile_tokens: tl.constexpr = BLOCK_ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    seq = tl.load(tiles_ptr + tile * TILE_FIELDS)
    if seq < 0:
        return
    start = tl.load(tiles_ptr + tile * TILE_FIELDS + 1).to(tl.int64)
    first_token = tl.load(tiles_ptr + tile * TILE_FIELDS + 2)
    query_len = tl.load(tiles_ptr + tile * TILE_FIELDS + 3)
    context = tl.load(tiles_ptr + tile * TILE_FIELDS + 4)

    row = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    token = first_token + row // GROUP
    is_row = (row < tile_tokens * GROUP) & (token < query_len)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    # 32 bits suffice inside a tile: registers are what the loops below lack
    first_row = ((start + first_token) * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    at = (row // GROUP * NUM_HEADS + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + first_row + at, mask=inside, other=0.0)
    best = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)

    # keys up to the first query are seen by all rows; those up to the last one by some
    position = context - query_len + token
    num_open = (context - query_len + first_token + 1) // BLOCK_KEYS * BLOCK_KEYS
    num_keys = tl.minimum(context - query_len + first_token + tile_tokens, context)
    pages = page_table_ptr + seq.to(tl.int64) * stride_seq
    head_offset = kv_head.to(tl.int64) * stride_head
    for first in range(0, num_open, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        offset = block_offsets(
            pages, key, key >= 0, head_offset, stride_page, stride_token, PAGE_TOKENS, BLOCK_DIM
        )
        read = tl.broadcast_to((dim < HEAD_DIM)[None, :], [BLOCK_KEYS, BLOCK_DIM])
        k = tl.load(k_ptr + offset, mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v = tl.load(v_ptr + offset, mask=read, other=0.0)
        best, weight, acc = accumulate(scores, scale, v, best, weight, acc)
    for first in range(num_open, num_keys, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        is_key = key < num_keys
        offset = block_offsets(
            pages, key, is_key, head_offset, stride_page, stride_token, PAGE_TOKENS, BLOCK_DIM
        )
        read = is_key[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + offset, mask=read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        v = tl.load(v_ptr + offset, mask=read, other=0.0)
        best, weight, acc = accumulate(scores, scale, v, best, weight, acc)

    # every row, padding too, sees key 0: no weight is zero
    out = acc / weight[:, None]
    tl.store(out_ptr + first_row + at, out.to(out_ptr.dtype.element_ty), mask=inside)
