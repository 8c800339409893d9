"""Shrink and expand for prefill: long segments, so that the passes over x and y are the work.

One unit a CTA: the host knows how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sgmv.tiles_kernel import RANKS, columns_of, find_block, item_entry, unpack
from kernels.silu_mul.triton import silu_times


@triton.jit(do_not_specialize=["module", "items", "max_tokens"])
def shrink_kernel(
    x_ptr: tl.tensor,
    pool_ptr: tl.tensor,
    lists_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    planes_ptr: tl.tensor,
    module: tl.tensor,
    items: tl.tensor,
    max_tokens: tl.tensor,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    PLANE_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """x [ROWS, K part] @ A.T [K part, ranks of GROUP pairs (slice, rank block) of one adapter]

    The pairs of an item are numbered slice by slice, over the rank blocks that it has.
    """
    COLUMNS: tl.constexpr = SLICES * PLANE_RANK
    EVEN: tl.constexpr = K % (BLOCK_K * CHUNKS) == 0
    GROUPS: tl.constexpr = (SLICES * RANK_BLOCKS + GROUP - 1) // GROUP
    unit = tl.program_id(0)
    split = unit % SPLITS
    row, rows, first, count, item = item_entry(lists_ptr, unit // (SPLITS * GROUPS), items)
    first_pair = unit // SPLITS % GROUPS * GROUP
    if first_pair >= SLICES * count:
        return
    r = tl.arange(0, GROUP * RANKS)
    pair = first_pair + r // RANKS
    slice_ = pair // count
    block = pair % count
    tile_ptrs = tiles_ptr + ((module + slice_).to(tl.int64) * items + item) * RANK_BLOCKS + block
    offset, rank_rows = unpack(tl.load(tile_ptrs, mask=slice_ < SLICES, other=0), ALIGN)
    t = tl.arange(0, ROWS)
    live = r % RANKS < rank_rows
    x_ptrs = x_ptr + ((row + t) * K)[:, None]
    a_ptrs = pool_ptr + (offset + r % RANKS * K)[:, None]
    acc = tl.zeros([ROWS, GROUP * RANKS], tl.float32)
    for c in tl.range(0, CHUNKS, num_stages=STAGES):
        k = (split * CHUNKS + c) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = (t < rows)[:, None]
        a_mask = live[:, None]
        if not EVEN:
            x_mask = x_mask & (k < K)[None, :]
            a_mask = a_mask & (k < K)[None, :]
        x = tl.load(x_ptrs + k[None, :], mask=x_mask, other=0.0)
        a = tl.load(a_ptrs + k[None, :], mask=a_mask, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    column = slice_ * PLANE_RANK + (first + block) * RANKS + r % RANKS
    plane_ptr = planes_ptr + (split * max_tokens + row) * COLUMNS
    tl.store(
        plane_ptr + t[:, None] * COLUMNS + column[None, :], acc, mask=(t < rows)[:, None] & live[None, :]
    )


@triton.jit(do_not_specialize=["module", "num_modules", "blocks_at", "blocks", "max_tokens"])
def expand_kernel(
    y_ptr: tl.tensor,
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
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    PLANE_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    ADD: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    """y (+)= scale * (h @ B.T), TILES tiles of BLOCK_N columns one after the other; the next one's y and B
    are on their way while the present one is computed. As B.T [BLOCK_N, ranks] @ h.T [ranks, ROWS]: h, cast
    on the way, must not be the operand that may lie in registers (triton-lang/triton#9433).
    """
    U0: tl.constexpr = (N0 + BLOCK_N * TILES - 1) // (BLOCK_N * TILES)
    U1: tl.constexpr = (N1 + BLOCK_N * TILES - 1) // (BLOCK_N * TILES)
    U2: tl.constexpr = (N2 + BLOCK_N * TILES - 1) // (BLOCK_N * TILES)
    COLUMNS: tl.constexpr = (1 + (N1 > 0) + (N2 > 0)) * PLANE_RANK
    row, rows, slot, count, tile, tile_ptr, slice_, nth = find_block(
        lists_ptr + blocks_at, tiles_ptr, tl.program_id(0), module, blocks, U0, U1, U2, RANK_BLOCKS
    )
    first, width = columns_of(slice_, N0, N1, N2, ALIGN)
    scale = tl.load(scales_ptr + slot * num_modules + module + slice_)
    r = tl.arange(0, RANKS)
    t = tl.arange(0, ROWS)
    if ADD:  # nothing to add where the module is absent
        rows = tl.where(tile > 0, rows, 0)
    t_mask = (t < rows)[:, None]
    y_row_ptrs = y_ptr + ((row + t) * (N0 + N1 + N2))[:, None] + first
    h_ptrs = planes_ptr + ((row + t) * COLUMNS)[:, None] + (slice_ * PLANE_RANK + r)[None, :]
    plane_stride = max_tokens * COLUMNS
    n0 = nth * (BLOCK_N * TILES)
    n = n0 + tl.arange(0, BLOCK_N)
    h, b = _first_rank_block(h_ptrs, plane_stride, t_mask, pool_ptr, tile, n, width, SPLITS, ALIGN)
    y = tl.zeros([ROWS, BLOCK_N], y_ptr.dtype.element_ty)
    if ADD:
        y = _tile_y(y_row_ptrs, n, t_mask, width)
    for _ in tl.range(0, tl.minimum(TILES, tl.cdiv(width - n0, BLOCK_N)), num_stages=1):
        following = n + BLOCK_N
        next_y = y
        if ADD:
            next_y = _tile_y(y_row_ptrs, following, t_mask, width)
        next_b = _tile_b(pool_ptr, tile, following, width, ALIGN)
        delta = _delta(b, h, count, tile_ptr, h_ptrs, plane_stride, t_mask, pool_ptr, n, width, SPLITS, ALIGN)
        y = y.to(tl.float32) + delta * scale
        tl.store(y_row_ptrs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=t_mask & (n < width)[None, :])
        n, y, b = following, next_y, next_b


@triton.jit(do_not_specialize=["module", "num_modules", "blocks_at", "blocks", "max_tokens"])
def expand_silu_mul_kernel(
    act_ptr: tl.tensor,
    y_ptr: tl.tensor,
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
    WIDTH: tl.constexpr,
    PLANE_RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    ALIGN: tl.constexpr,
) -> None:
    """act = silu(gate) * up, where y = (gate | up) lacks its delta: y is read once and not written."""
    UNITS: tl.constexpr = (WIDTH + BLOCK_N * TILES - 1) // (BLOCK_N * TILES)
    COLUMNS: tl.constexpr = 2 * PLANE_RANK
    dtype = y_ptr.dtype.element_ty
    row, rows, slot, count, gate_tile, gate_tile_ptr, _, nth = find_block(
        lists_ptr + blocks_at, tiles_ptr, tl.program_id(0), module, blocks, UNITS, 0, 0, RANK_BLOCKS
    )
    up_tile_ptr = gate_tile_ptr + blocks.to(tl.int64) * RANK_BLOCKS
    up_tile = tl.load(up_tile_ptr)
    scale_ptr = scales_ptr + slot * num_modules + module
    gate_scale = tl.load(scale_ptr)
    up_scale = tl.load(scale_ptr + 1)
    r = tl.arange(0, RANKS)
    t = tl.arange(0, ROWS)
    t_mask = (t < rows)[:, None]
    gate_ptrs = y_ptr + ((row + t) * (2 * WIDTH))[:, None]
    up_ptrs = gate_ptrs + WIDTH
    act_ptrs = act_ptr + ((row + t) * WIDTH)[:, None]
    gate_h_ptrs = planes_ptr + ((row + t) * COLUMNS)[:, None] + r[None, :]
    up_h_ptrs = gate_h_ptrs + PLANE_RANK
    plane_stride = max_tokens * COLUMNS
    n0 = nth * (BLOCK_N * TILES)
    n = n0 + tl.arange(0, BLOCK_N)
    gate_h, gate_b = _first_rank_block(
        gate_h_ptrs, plane_stride, t_mask, pool_ptr, gate_tile, n, WIDTH, SPLITS, ALIGN
    )
    up_h, up_b = _first_rank_block(
        up_h_ptrs, plane_stride, t_mask, pool_ptr, up_tile, n, WIDTH, SPLITS, ALIGN
    )
    gate = _tile_y(gate_ptrs, n, t_mask, WIDTH)
    up = _tile_y(up_ptrs, n, t_mask, WIDTH)
    for _ in tl.range(0, tl.minimum(TILES, tl.cdiv(WIDTH - n0, BLOCK_N)), num_stages=1):
        following = n + BLOCK_N
        next_gate = _tile_y(gate_ptrs, following, t_mask, WIDTH)
        next_up = _tile_y(up_ptrs, following, t_mask, WIDTH)
        next_gate_b = _tile_b(pool_ptr, gate_tile, following, WIDTH, ALIGN)
        next_up_b = _tile_b(pool_ptr, up_tile, following, WIDTH, ALIGN)
        delta = _delta(
            gate_b, gate_h, count, gate_tile_ptr, gate_h_ptrs, plane_stride, t_mask, pool_ptr, n, WIDTH,
            SPLITS, ALIGN,
        )  # fmt: skip
        gate_sum = (gate.to(tl.float32) + delta * gate_scale).to(dtype)
        delta = _delta(
            up_b, up_h, count, up_tile_ptr, up_h_ptrs, plane_stride, t_mask, pool_ptr, n, WIDTH,
            SPLITS, ALIGN,
        )  # fmt: skip
        up_sum = (up.to(tl.float32) + delta * up_scale).to(dtype)
        act = silu_times(gate_sum, up_sum, dtype)
        tl.store(act_ptrs + n[None, :], act, mask=t_mask & (n < WIDTH)[None, :])
        n, gate, up, gate_b, up_b = following, next_gate, next_up, next_gate_b, next_up_b


@triton.jit
def _first_rank_block(
    h_ptrs: tl.tensor,
    plane_stride: tl.tensor,
    t_mask: tl.tensor,
    pool_ptr: tl.tensor,
    tile: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """h [ROWS, ranks], fp32, and B [ranks, BLOCK_N] for the columns n."""
    return (
        _sum_planes(h_ptrs, plane_stride, t_mask, tile, SPLITS, ALIGN),
        _tile_b(pool_ptr, tile, n, width, ALIGN),
    )


@triton.jit
def _delta(
    b: tl.tensor,
    h: tl.tensor,
    count: tl.tensor,
    tile_ptr: tl.tensor,
    h_ptrs: tl.tensor,
    plane_stride: tl.tensor,
    t_mask: tl.tensor,
    pool_ptr: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    """h @ B [ROWS, BLOCK_N] over all rank blocks; b and h are the first one's."""
    acc = tl.zeros([b.shape[1], h.shape[0]], tl.float32)
    acc = _multiply(acc, b, h)
    for j in tl.range(1, count, num_stages=1):
        tile = tl.load(tile_ptr + j)
        more_b = _tile_b(pool_ptr, tile, n, width, ALIGN)
        more_h = _sum_planes(h_ptrs + j * RANKS, plane_stride, t_mask, tile, SPLITS, ALIGN)
        acc = _multiply(acc, more_b, more_h)
    return tl.trans(acc)


@triton.jit
def _tile_y(
    row_ptrs: tl.tensor,
    n: tl.tensor,
    t_mask: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    return tl.load(row_ptrs + n[None, :], mask=t_mask & (n < width)[None, :], other=0.0)


@triton.jit
def _tile_b(
    pool_ptr: tl.tensor,
    tile: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    offset, rank_rows = unpack(tile, ALIGN)
    r = tl.arange(0, RANKS)
    mask = (r < rank_rows)[:, None] & (n < width)[None, :]
    return tl.load(pool_ptr + offset + r[:, None] * width + n[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_planes(
    h_ptrs: tl.tensor,
    plane_stride: tl.tensor,
    t_mask: tl.tensor,
    tile: tl.tensor,
    SPLITS: tl.constexpr,
    ALIGN: tl.constexpr,
) -> tl.tensor:
    _, rank_rows = unpack(tile, ALIGN)
    mask = t_mask & (tl.arange(0, RANKS) < rank_rows)[None, :]
    h = tl.load(h_ptrs, mask=mask, other=0.0)
    for p in tl.static_range(1, SPLITS):
        h += tl.load(h_ptrs + p * plane_stride, mask=mask, other=0.0)
    return h


@triton.jit
def _multiply(
    acc: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
) -> tl.tensor:
    """acc [N, T] + b.T [N, ranks] @ h.T [ranks, T]; h as two numbers of b's dtype, for twice the precision"""
    b = tl.trans(b)
    high = h.to(b.dtype)
    acc = tl.dot(b, tl.trans(high), acc, input_precision="ieee")
    if b.dtype != tl.float32:
        low = (h - high.to(tl.float32)).to(b.dtype)
        acc = tl.dot(b, tl.trans(low), acc)
    return acc
