"""Shrink and expand for prefill: long segments, so that the passes over x and y are the work.

One unit a CTA: the host knows how many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sgmv.tiles_kernel import RANKS, columns_of, find_block, find_item, unpack


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
    ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """x [ROWS, K part] @ A.T [K part, ranks of a group of rank blocks]"""
    COLUMNS: tl.constexpr = SLICES * PLANE_RANK
    EVEN: tl.constexpr = K % (BLOCK_K * CHUNKS) == 0
    row, rows, first, tile, slice_, split = find_item(
        lists_ptr, tiles_ptr, tl.program_id(0), module, items, SPLITS, SLICES, RANK_BLOCKS
    )
    offset, rank_rows = unpack(tile, ALIGN)
    t = tl.arange(0, ROWS)
    r = tl.arange(0, RANK_BLOCKS * RANKS)
    live = r % RANKS < rank_rows
    x_ptrs = x_ptr + ((row + t) * K)[:, None]
    a_ptrs = pool_ptr + (offset + r % RANKS * K)[:, None]
    acc = tl.zeros([ROWS, RANK_BLOCKS * RANKS], tl.float32)
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
    plane_ptr = planes_ptr + (split * max_tokens + row) * COLUMNS + slice_ * PLANE_RANK + first * RANKS
    tl.store(plane_ptr + t[:, None] * COLUMNS + r[None, :], acc, mask=(t < rows)[:, None] & live[None, :])


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
    ALIGN: tl.constexpr,
) -> None:
    """y += scale * (h @ B.T), TILES tiles of BLOCK_N columns one after the other; the next one's y and B are
    on their way while the present one is computed. As B.T [BLOCK_N, ranks] @ h.T [ranks, ROWS]: h, cast on
    the way, must not be the operand that may lie in registers (triton-lang/triton#9433).
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
    t_mask = (t < tl.where(tile > 0, rows, 0))[:, None]  # where the module is absent, nothing to add
    y_row_ptrs = y_ptr + ((row + t) * (N0 + N1 + N2))[:, None] + first
    h_ptrs = planes_ptr + ((row + t) * COLUMNS)[:, None] + (slice_ * PLANE_RANK + r)[None, :]
    plane_stride = max_tokens * COLUMNS
    n0 = nth * (BLOCK_N * TILES)
    n = n0 + tl.arange(0, BLOCK_N)
    offset, rank_rows = unpack(tile, ALIGN)
    h = _sum_planes(h_ptrs, plane_stride, t_mask & (r < rank_rows)[None, :], SPLITS)
    y = _tile_y(y_row_ptrs, n, t_mask, width)
    b = _tile_b(pool_ptr, offset, rank_rows, n, width)
    for _ in tl.range(0, tl.minimum(TILES, tl.cdiv(width - n0, BLOCK_N)), num_stages=1):
        following = n + BLOCK_N
        next_y = _tile_y(y_row_ptrs, following, t_mask, width)
        next_b = _tile_b(pool_ptr, offset, rank_rows, following, width)
        acc = _multiply(tl.zeros([BLOCK_N, ROWS], tl.float32), b, h)
        for j in tl.range(1, count, num_stages=1):
            more_offset, more_rows = unpack(tl.load(tile_ptr + j), ALIGN)
            more_b = _tile_b(pool_ptr, more_offset, more_rows, n, width)
            more_mask = t_mask & (r < more_rows)[None, :]
            more_h = _sum_planes(h_ptrs + j * RANKS, plane_stride, more_mask, SPLITS)
            acc = _multiply(acc, more_b, more_h)
        y = y.to(tl.float32) + tl.trans(acc * scale)
        tl.store(y_row_ptrs + n[None, :], y.to(y_ptr.dtype.element_ty), mask=t_mask & (n < width)[None, :])
        n, y, b = following, next_y, next_b


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
    offset: tl.tensor,
    rank_rows: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
) -> tl.tensor:
    r = tl.arange(0, RANKS)
    mask = (r < rank_rows)[:, None] & (n < width)[None, :]
    return tl.load(pool_ptr + offset + r[:, None] * width + n[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_planes(
    h_ptrs: tl.tensor,
    plane_stride: tl.tensor,
    mask: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
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
