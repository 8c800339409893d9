"""The base model's linears on a GPU in decode: few rows of x, so that reading W once is the work.

Each program owns some columns of y and walks all of K: no split, no partial sums, one order of every sum. Its
tiles of W come through the tensor memory accelerator, several on the way at once. cuBLAS does what does not
fit: more rows, and weights so small that too few programs would share them.

Tried on an H200 for Llama-3-8B, and not faster: K split in 2 to 4 with sums in the L2, W read ahead into the
L2 by the launches between the products, and programs that walk several tiles of columns. K split in 2, its
halves left apart, takes 2 to 8 % less for o and down; but whoever reads them would have to add them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu import is_at_least_hopper, most_shared_bytes
from kernels.linear.tiles import FEW_ROWS, FEW_ROWS_BESIDE, FULL_ROWS, Tile, has_tile
from kernels.peers.triton import PeerBuffers, SendArguments, send

MIN_WEIGHT_ELEMS = 1 << 23
NUM_PROGRAMS = 132
"""Multiprocessors of an H200: fewer programs than these leave some without work."""
BARRIER_BYTES = 1 << 10
"""Shared memory that a program has beside its tiles, at most."""
READ_AHEAD = tl.constexpr(512)
"""Elements of each column's weights that a dependent launch asks for before it waits. On an H200 steps of 64
rows with adapters took up to 1.8 % less with that; without adapters four times as many cost 4 %.
"""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    leaves_room: bool = False,
) -> torch.Tensor:
    """x [T, in], weight [out, in], both contiguous -> [T, out], a new tensor, or `out`.

    pdl: as of rotary_kv_write, where this is not left to cuBLAS.
    leaves_room: on each multiprocessor, for a CTA of a LoRA branch.
    """
    return linear_to_peers(x, weight, None, out, pdl, leaves_room)[0]


def linear_to_peers(
    x: torch.Tensor,
    weight: torch.Tensor,
    peers: PeerBuffers | None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    leaves_room: bool = False,
) -> tuple[torch.Tensor, bool]:
    """As `linear`; whether the result was sent to all ranks, this one too, instead of into the tensor.

    Not by cuBLAS. Each program sends what it has computed while others still compute: ranks have less to wait
    for, and what runs behind the launch may begin before all of it has ended.
    """
    out = x.new_empty(len(x), len(weight)) if out is None else out
    tile = tile_for(len(x), weight, leaves_room)
    if tile is None:
        return torch.mm(x, weight.T, out=out), False
    return small_linear(x, weight, tile, out, pdl, peers=peers), peers is not None


def tile_for(num_rows: int, weight: torch.Tensor, leaves_room: bool = False) -> Tile | None:
    """None: it is left to cuBLAS."""
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    is_aligned = weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
    if not has_tile(num_rows) or weight.numel() < MIN_WEIGHT_ELEMS or not is_half or not is_aligned:
        return None
    if not is_at_least_hopper(weight.device):
        return None
    tile = _tile_on_hopper(num_rows, len(weight), leaves_room)
    has_memory = tile.operand_elems * weight.itemsize + BARRIER_BYTES <= most_shared_bytes(weight.device)
    return tile if has_memory else None


def _tile_on_hopper(num_rows: int, num_columns: int, leaves_room: bool) -> Tile:
    if num_rows <= FEW_ROWS.rows:
        return FEW_ROWS_BESIDE if leaves_room else FEW_ROWS
    # the narrowest whose programs run all at once
    return next((t for t in FULL_ROWS if num_columns <= NUM_PROGRAMS * t.columns), FULL_ROWS[-1])


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: Tile,
    out: torch.Tensor,
    pdl: bool = False,
    peers: PeerBuffers | None = None,
) -> torch.Tensor:
    """At most tile.rows rows of x; rows of both operands begin at multiples of 16 bytes.

    peers: as wide as `out`; each of them gets what else would be in `out`, this rank too.
    """
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert out.is_contiguous()
    assert len(x) <= tile.rows
    num_columns, in_features = weight.shape
    assert x.shape[1] == in_features
    assert out.shape == (len(x), num_columns)
    if len(x) == 0:
        return out
    sending = SendArguments.of(peers, out)
    _linear_kernel[(triton.cdiv(num_columns, tile.columns),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.block_k]),
        weight,
        out,
        sending.rows,
        sending.max_rows,
        len(x),
        num_columns,
        K=in_features,
        ROWS=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.block_k,
        WEIGHT_FIRST=tile.weight_first,
        STAGES=tile.num_stages,
        RANK=sending.rank,
        WORLD=sending.world,
        PROGRAMS=NUM_PROGRAMS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["max_rows", "num_rows"])
def _linear_kernel(
    x_desc: tl.tensor_descriptor,
    weight_desc: tl.tensor_descriptor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """What lies past the ends of x and W reads as zeros."""
    first = tl.program_id(0) * BLOCK_N
    if PDL:
        if K >= READ_AHEAD and tl.program_id(0) < PROGRAMS:  # later ones start when others have ended
            _read_ahead(weight_ptr, first, num_columns, K, BLOCK_N)
        # before the loop: loads behind a wait inside would be hoisted above it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([BLOCK_N, ROWS] if WEIGHT_FIRST else [ROWS, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weight = weight_desc.load([first, k])
        x = x_desc.load([0, k])
        acc = tl.dot(weight, tl.trans(x), acc) if WEIGHT_FIRST else tl.dot(x, tl.trans(weight), acc)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    row = tl.arange(0, ROWS)[:, None]
    column = first + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    at = row.to(tl.int64) * num_columns + column
    y = acc.to(out_ptr.dtype.element_ty)
    if WORLD == 1:
        tl.store(out_ptr + at, y, mask=inside)
    else:
        send(y, rows_ptrs, RANK * max_rows * num_columns + at, inside, RANK, WORLD, TO_SELF=True)


@triton.jit
def _read_ahead(
    weight_ptr: tl.tensor,
    first: tl.tensor,
    num_columns: tl.tensor,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Into the L2 cache, by one request a thread."""
    THREADS: tl.constexpr = 128
    PARTS: tl.constexpr = THREADS // BLOCK_N
    ELEMS: tl.constexpr = READ_AHEAD // PARTS
    thread = tl.arange(0, THREADS)
    column = tl.minimum(first + thread // PARTS, num_columns - 1).to(tl.int64)
    at = weight_ptr + column * K + thread % PARTS * ELEMS
    nbytes = tl.full([THREADS], ELEMS * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
