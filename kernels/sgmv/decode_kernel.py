"""Shrink and expand for decode: few tokens an adapter, so that reading A and B is the work.

Each CTA walks units u, u + grid, ... and asks for the next unit's place before it works on the present one.
HOW: what ranks hand over (kernels.sgmv.handover); part, calls, GROUP_RANK and GROUP_SIZE are of that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.peers.triton import send
from kernels.sgmv.handover import BY_INPUT, BY_OUTPUT, NOTHING, call_tag, hand_over, take
from kernels.sgmv.tiles_kernel import RANKS, columns_of, find_block, item_entry, unpack


@triton.jit(do_not_specialize=["module", "items", "max_tokens", "part", "calls"])
def shrink_kernel(
    x_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    module: tl.tensor,
    items: tl.tensor,
    max_tokens: tl.tensor,
    words_ptrs: tl.tuple,
    part: tl.tensor,
    calls: tl.tensor,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    PLANE_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    HOW: tl.constexpr,
    GROUP_RANK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> None:
    COLUMNS: tl.constexpr = SLICES * PLANE_RANK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tag = call_tag(lists_ptr, module, calls)
    unit = tl.program_id(0)
    row, rows, first, tile, slice_, split = _find_item(
        lists_ptr, tiles_ptr, unit, module, items, SPLITS, SLICES
    )
    while rows > 0:
        unit += tl.num_programs(0)
        next_row, next_rows, next_first, next_tile, next_slice, next_split = _find_item(
            lists_ptr, tiles_ptr, unit, module, items, SPLITS, SLICES
        )
        if tile > 0:  # or there is none, or its rows were dealt to other ranks
            sums, inside = _shrink_rows(
                x_ptr + row * K, pool_ptr, tile, rows, split * (BLOCK_K * CHUNKS),
                K, CHUNKS, BLOCK_K, ROWS, ALIGN, WARPS, STAGES,
            )  # fmt: skip
            at = (split * max_tokens + row) * COLUMNS + slice_ * PLANE_RANK
            if HOW == NOTHING:
                t = tl.arange(0, ROWS)[:, None]
                r = tl.arange(0, RANKS)[None, :]
                tl.store(planes_ptr + at + t * COLUMNS + first * RANKS + r, sums, mask=inside)
            else:
                at += GROUP_RANK * part
                hand_over(sums, inside, tag, words_ptrs, at, first * RANKS, COLUMNS, HOW, GROUP_SIZE)
        row, rows, first, tile = next_row, next_rows, next_first, next_tile
        slice_, split = next_slice, next_split


@triton.jit
def _find_item(
    lists_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    unit: tl.tensor,
    module: tl.tensor,
    items: tl.tensor,
    SPLITS: tl.constexpr,
    SLICES: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Of a unit: first token, tokens (0: past the end), rank block, tile, slice, part of K."""
    row, rows, first, _, item = item_entry(lists_ptr, unit // (SPLITS * SLICES), items)
    slice_ = unit // SPLITS % SLICES
    tile = tl.load(tiles_ptr + (module + slice_).to(tl.int64) * items + item)
    return row, rows, first, tile, slice_, unit % SPLITS


@triton.jit
def _shrink_rows(
    x_row_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    k0: tl.tensor,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Partial sums [ROWS, RANKS] fp32, and which of them there are.

    With tensor cores, a part of K for each warp: on one product of 16 x 16 all would do the same.
    """
    offset, rank_rows = unpack(tile, ALIGN)
    PART: tl.constexpr = BLOCK_K // WARPS
    EVEN: tl.constexpr = K % (BLOCK_K * CHUNKS) == 0
    t = tl.arange(0, ROWS)
    r = tl.arange(0, RANKS)
    k_in_block = tl.arange(0, WARPS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    x_mask = (t < rows)[None, :, None]
    a_mask = (r < rank_rows)[None, :, None]
    acc = tl.zeros([WARPS, ROWS, RANKS], tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES):
        k = k0 + c * BLOCK_K + k_in_block
        if EVEN:
            x = tl.load(x_row_ptr + t[None, :, None] * K + k, mask=x_mask, other=0.0)
            a = tl.load(pool_ptr + offset + r[None, :, None] * K + k, mask=a_mask, other=0.0)
        else:
            x = tl.load(x_row_ptr + t[None, :, None] * K + k, mask=x_mask & (k < K), other=0.0)
            a = tl.load(pool_ptr + offset + r[None, :, None] * K + k, mask=a_mask & (k < K), other=0.0)
        acc = tl.dot(x, tl.permute(a, (0, 2, 1)), acc, input_precision="ieee")
    return tl.sum(acc, 0), (t < rows)[:, None] & (r < rank_rows)[None, :]


@triton.jit(
    do_not_specialize=[
        "module", "num_modules", "blocks_at", "blocks", "max_tokens", "max_sent_rows", "part", "calls",
    ]
)  # fmt: skip
def expand_kernel(
    out_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    module: tl.tensor,
    num_modules: tl.tensor,
    blocks_at: tl.tensor,
    blocks: tl.tensor,
    max_tokens: tl.tensor,
    sent_ptrs: tl.tuple,
    max_sent_rows: tl.tensor,
    words_ptrs: tl.tuple,
    part: tl.tensor,
    calls: tl.tensor,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    PLANE_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,
    ALIGN: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PDL: tl.constexpr,
    HOW: tl.constexpr,
    GROUP_RANK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> None:
    """Without tensor cores: a thread owns eight columns and all ranks, so that a sum needs no exchange."""
    tl.static_assert(ROWS == 4)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    U0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    U1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    U2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    COLUMNS: tl.constexpr = (1 + (N1 > 0) + (N2 > 0)) * PLANE_RANK
    tag = call_tag(lists_ptr, module, calls)
    blocks_ptr = lists_ptr + blocks_at
    unit = tl.program_id(0)
    row, rows, slot, count, tile, tile_ptr, slice_, nth = find_block(
        blocks_ptr, tiles_ptr, unit, module, blocks, U0, U1, U2, RANK_BLOCKS
    )
    if PDL and HOW == NOTHING:
        tl.extra.cuda.gdc_wait()
    while rows > 0:
        unit += tl.num_programs(0)
        next_row, next_rows, next_slot, next_count, next_tile, next_tile_ptr, next_slice, next_nth = (
            find_block(blocks_ptr, tiles_ptr, unit, module, blocks, U0, U1, U2, RANK_BLOCKS)
        )
        first, width = columns_of(slice_, N0, N1, N2, ALIGN)
        n = nth * BLOCK_N + tl.arange(0, BLOCK_N)
        scale = tl.load(scales_ptr + slot * num_modules + module + slice_)
        end = width
        if ADD:  # nothing to add where the module is absent
            end = tl.where(tile > 0, width, 0)
        h_at = row * COLUMNS + slice_ * PLANE_RANK
        acc0, acc1, acc2, acc3 = _expand_rows(
            tile, tile_ptr, count, rows, h_at, planes_ptr, words_ptrs[GROUP_RANK], tag, pool_ptr, n, end,
            width, max_tokens, part, COLUMNS, SPLITS, RANK_BLOCKS, ROWS, ALIGN, HOW, GROUP_SIZE,
        )  # fmt: skip
        WIDTH: tl.constexpr = N0 + N1 + N2
        at = row * WIDTH + first + n
        to = at + RANK * max_sent_rows * WIDTH
        _put_rows(
            out_ptr, at, acc0, acc1, acc2, acc3, scale, rows, n, end, sent_ptrs, to, WIDTH, ADD, RANK, WORLD
        )  # fmt: skip
        row, rows, slot, count, tile, tile_ptr, slice_, nth = (
            next_row, next_rows, next_slot, next_count, next_tile, next_tile_ptr, next_slice, next_nth
        )  # fmt: skip
    if PDL and HOW != NOTHING:
        # all has come from the launch before, but who waits for this one must not be ahead of its end
        tl.extra.cuda.gdc_wait()


@triton.jit
def _expand_rows(
    tile: tl.tensor,
    tile_ptr: tl.tensor,
    count: tl.tensor,
    rows: tl.tensor,
    h_at: tl.tensor,
    planes_ptr: tl.tensor,
    words_ptr: tl.tensor,
    tag: tl.tensor,
    pool_ptr: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    width: tl.tensor,
    max_tokens: tl.tensor,
    part: tl.tensor,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    HOW: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """h @ B at the columns n, for four rows; h_at: where in a plane those of the first rank row are."""
    r = tl.arange(0, RANKS)
    acc0 = tl.zeros(n.shape, tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for i in range(count):
        offset, rank_rows = unpack(tile, ALIGN)
        tile = tl.load(tile_ptr + tl.minimum(i + 1, RANK_BLOCKS - 1))
        b_mask = (r < rank_rows)[:, None] & (n < end)[None, :]
        b = tl.load(pool_ptr + offset + r[:, None] * width + n[None, :], mask=b_mask, other=0.0)
        h = _hidden(
            planes_ptr, words_ptr, tag, h_at, i * RANKS, rank_rows, rows, max_tokens, part,
            COLUMNS, SPLITS, ROWS, HOW, GROUP_SIZE,
        )  # fmt: skip
        even, odd = tl.split(tl.reshape(h, (RANKS, 2, 2)))
        h0, h2 = tl.split(even)
        h1, h3 = tl.split(odd)
        if rows == 1:
            acc0 += tl.sum(b.to(tl.float32) * h0[:, None], 0)
        else:
            wide = b.to(tl.float32)
            acc0 += tl.sum(wide * h0[:, None], 0)
            acc1 += tl.sum(wide * h1[:, None], 0)
            acc2 += tl.sum(wide * h2[:, None], 0)
            acc3 += tl.sum(wide * h3[:, None], 0)
    return acc0, acc1, acc2, acc3


@triton.jit
def _hidden(
    planes_ptr: tl.tensor,
    words_ptr: tl.tensor,
    tag: tl.tensor,
    h_at: tl.tensor,
    first: tl.tensor,
    rank_rows: tl.tensor,
    rows: tl.tensor,
    max_tokens: tl.tensor,
    part: tl.tensor,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    HOW: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
) -> tl.tensor:
    """[RANKS, ROWS] of the rank rows from `first`: the sum of all planes, or of what the ranks hand over."""
    PLANES: tl.constexpr = SPLITS * (GROUP_SIZE if HOW == BY_INPUT else 1)
    plane = tl.arange(0, triton.next_power_of_2(PLANES))[:, None, None]
    r = tl.arange(0, RANKS)[None, :, None]
    t = tl.arange(0, ROWS)[None, None, :]
    inside = (plane < PLANES) & (r < rank_rows) & (t < rows)
    at = h_at + (plane % SPLITS * max_tokens + t) * COLUMNS
    if HOW == NOTHING:
        h = tl.load(planes_ptr + at + first + r, mask=inside, other=0.0)
    elif HOW == BY_OUTPUT:  # each rank row was dealt to one rank
        at += (first + r) % GROUP_SIZE * part + (first + r) // GROUP_SIZE
        h = take(words_ptr + at, inside, tag)
    else:
        at += plane // SPLITS * part + first + r
        h = take(words_ptr + at, inside, tag)
    return tl.sum(h, 0)


@triton.jit
def _put_rows(
    out_ptr: tl.tensor,
    at: tl.tensor,
    acc0: tl.tensor,
    acc1: tl.tensor,
    acc2: tl.tensor,
    acc3: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    sent_ptrs: tl.tuple,
    to: tl.tensor,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    """Of up to four rows the columns n; at, to: where the first row's go."""
    _put(out_ptr, at, acc0 * scale, n < end, sent_ptrs, to, ADD, RANK, WORLD)
    if rows > 1:
        _put(out_ptr, at + WIDTH, acc1 * scale, n < end, sent_ptrs, to + WIDTH, ADD, RANK, WORLD)
        third = n < tl.where(rows > 2, end, 0)
        _put(out_ptr, at + 2 * WIDTH, acc2 * scale, third, sent_ptrs, to + 2 * WIDTH, ADD, RANK, WORLD)
        fourth = n < tl.where(rows > 3, end, 0)
        _put(out_ptr, at + 3 * WIDTH, acc3 * scale, fourth, sent_ptrs, to + 3 * WIDTH, ADD, RANK, WORLD)


@triton.jit
def _put(
    out_ptr: tl.tensor,
    at: tl.tensor,
    delta: tl.tensor,
    mask: tl.tensor,
    sent_ptrs: tl.tuple,
    to: tl.tensor,
    ADD: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    if ADD:
        delta += tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rounded = delta.to(out_ptr.dtype.element_ty)
    if WORLD == 1:
        tl.store(out_ptr + at, rounded, mask=mask)
    else:
        send(rounded, sent_ptrs, to, mask, RANK, WORLD, TO_SELF=True)
