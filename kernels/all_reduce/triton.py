"""One-shot all-reduce over NVLink with residual add and RMSNorm in one launch, for a step's few rows.

Every rank writes its part of a row into all others' memory, waits until theirs are in its own, and sums: one
trip over the link, where a ring or a reduce-scatter takes several. The launch that computed the part may have
written it already (kernels.linear.triton). From each rank N - 1 times the row crosses
the link, so that large inputs are NCCL's. There are no flags: an element that has not come yet is EMPTY, and
whoever has read it makes it so again. So nobody waits for a fence between values and flag, or reads a flag
before the values. After the one-shot algorithm of TensorRT-LLM's all-reduce, whose name for such buffers is
Lamport's.

There are two sets of buffers, for calls in turn. A set is written again by the call after the next; a rank
that is there has ended the call in between, so it had all parts of that call, so every other rank had begun
it, and had ended the one that read this set. Hence no barrier at the end. What sends a part ahead of a call
runs behind the call before, so the same holds for it.

A program waits for the other ranks' programs of its number only. All of a launch run at once: there are few
enough, and each takes rows in turn.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.rms_norm.triton import norm_row

NUM_SETS = 2
EMPTY = 0xFF
"""Every byte of an element that has not come. As a number it is one NaN of many, and sent as another one."""


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """Of one set, memory of all ranks as this one sees it: what a rank is sent, and by whom."""

    rank: int
    rows: tuple[torch.Tensor, ...]  # of each rank: [ranks, most rows, H], EMPTY between calls
    owner: object = None  # of the memory, where the tensors do not own it

    @property
    def max_rows(self) -> int:
        return self.rows[0].shape[1]


def all_reduce_add_rms_norm(
    residual: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    peers: PeerBuffers,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    pdl: bool = False,
    is_sent: bool = False,
) -> torch.Tensor:
    """The contract of kernels.all_reduce.reference for this rank; residual in place, returns `out`, new.

    residual, y and delta [T, H] contiguous, T at most peers.max_rows and the same on all ranks; delta and
    slots: both or neither. All ranks must call it as often and in the same order, sets in turn. Never ends if
    another rank does not call it.
    is_sent: by `send`, in the launch that made y, behind the call before this one. Ranks may differ in that.
    pdl: as of rotary_kv_write.
    """
    assert (delta is None) == (slots is None)
    assert not is_sent or delta is None
    for tensor in (y, delta):
        assert tensor is None or (tensor.shape == residual.shape and tensor.is_contiguous())
    assert residual.is_contiguous()
    num_rows, width = residual.shape
    assert num_rows <= peers.max_rows
    out = torch.empty_like(residual)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    _all_reduce_kernel[(min(num_rows, most_programs(residual.device, block * y.itemsize)),)](
        residual,
        y,
        delta,
        slots,
        weight,
        out,
        peers.rows,
        peers.max_rows,
        num_rows,
        width,
        eps,
        RANK=peers.rank,
        WORLD=len(peers.rows),
        HAS_DELTA=delta is not None,
        IS_SENT=is_sent,
        PDL=pdl,
        launch_pdl=pdl,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),  # 8 elements a thread: one load of 16 bytes in bf16
    )
    return out


@functools.cache
def most_programs(device: torch.device, row_bytes: int) -> int:
    """That surely run at once: of 512 threads, and of 64 registers each up to rows of 16 KiB."""
    if device.type != "cuda":
        return 1  # the interpreter runs one after another
    return torch.cuda.get_device_properties(device).multi_processor_count * (
        2 if row_bytes <= 16 << 10 else 1
    )


def split_symmetric(
    tensors: Sequence[torch.Tensor],
    rank: int,
    max_rows: int,
    width: int,
    dtype: torch.dtype,
    owner: object = None,
) -> tuple[PeerBuffers, PeerBuffers]:
    """The sets in the ranks' symmetric memory, uint8 [symmetric_bytes(...)] each, made EMPTY by its owner."""
    shape = (NUM_SETS, len(tensors), max_rows, width)
    first, second = zip(*(tensor.view(dtype).view(shape) for tensor in tensors), strict=True)
    return PeerBuffers(rank, first, owner), PeerBuffers(rank, second, owner)


def symmetric_bytes(world: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
    """That each rank has to share."""
    return NUM_SETS * world * max_rows * width * dtype.itemsize


@triton.jit(do_not_specialize=["max_rows", "num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _all_reduce_kernel(
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_SENT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = row * width + columns
        own = tl.load(y_ptr + at, mask=inside, other=0.0)
        if HAS_DELTA:
            delta_width = tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
            delta = tl.load(delta_ptr + at, mask=columns < delta_width, other=0.0)
            own = (own.to(tl.float32) + delta.to(tl.float32)).to(own.dtype)
        if not IS_SENT:
            send(own, rows_ptrs, (RANK * max_rows + row) * width + columns, inside, RANK, WORLD)
        total = _receive(own, rows_ptrs, row, max_rows, width, columns, inside, RANK, WORLD)
        values = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        values = (values + total.to(own.dtype).to(tl.float32)).to(own.dtype).to(tl.float32)
        tl.store(residual_ptr + at, values.to(own.dtype), mask=inside)
        tl.store(out_ptr + at, norm_row(values, weight, width, eps, own.dtype), mask=inside)


@triton.jit
def send(
    own: tl.tensor,
    rows_ptrs: tl.tuple,
    to: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> None:
    """`own` to all other ranks; `to`: where this rank's part lies in their memory [ranks, most rows, H]."""
    dtype: tl.constexpr = own.dtype
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty = tl.full(own.shape, -1, bits)
    other_nan = tl.full(own.shape, (1 << (dtype.primitive_bitwidth - 1)) - 1, bits)
    sent = own.to(bits, bitcast=True)
    sent = tl.where(sent == empty, other_nan, sent).to(dtype, bitcast=True)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            tl.store(rows_ptrs[peer] + to, sent, mask=inside)


@triton.jit
def _receive(
    own: tl.tensor,
    rows_ptrs: tl.tuple,
    row: tl.tensor,
    max_rows: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
) -> tl.tensor:
    """One row of all ranks, summed in float32, in order of rank."""
    dtype: tl.constexpr = own.dtype
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty = tl.full(columns.shape, -1, bits)
    total = tl.zeros(columns.shape, tl.float32)
    for peer in tl.static_range(WORLD):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            theirs = rows_ptrs[RANK] + (peer * max_rows + row) * width + columns
            part = tl.load(theirs, mask=inside, other=0.0, volatile=True)
            while tl.max((part.to(bits, bitcast=True) == empty).to(tl.int32), axis=0) != 0:
                part = tl.load(theirs, mask=inside, other=0.0, volatile=True)
            tl.store(theirs, empty.to(dtype, bitcast=True), mask=inside)
            total += part.to(tl.float32)
    return total
