"""Memory in which the ranks of a group write to each other over NVLink: what is sent and how it is received.

There are no flags: an element that has not come yet is EMPTY, and whoever has read it makes it so again. So
nobody waits for a fence between values and flag, or reads a flag before the values. After the one-shot
algorithm of TensorRT-LLM's all-reduce, whose name for such buffers is Lamport's.

There are two sets of buffers, for calls in turn. A set is written again by the call after the next; a rank
that is there has ended the call in between, so it had all parts of that call, so every other rank had begun
it, and had ended the one that read this set. Hence no barrier at the end. What sends a part ahead of a call
runs behind the call before, so the same holds for it.

A program waits for the other ranks' programs of its number only. All of a launch must run at once: there are
few enough (`most_programs`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

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


PeerSets = tuple[PeerBuffers, PeerBuffers]


class SendArguments(NamedTuple):
    """Of a launch that may `send` what it writes."""

    rows: tuple[torch.Tensor, ...]
    max_rows: int
    rank: int
    world: int

    @classmethod
    def of(cls, peers: PeerBuffers | None, out: torch.Tensor) -> SendArguments:
        """`out` [T, H]: what the launch writes; without peers nothing is sent."""
        if peers is None:
            return cls((out,), 0, 0, 1)
        assert len(out) <= peers.max_rows
        assert out.shape[1] == peers.rows[0].shape[-1]
        return cls(peers.rows, peers.max_rows, peers.rank, len(peers.rows))


@functools.cache
def most_programs(device: torch.device, num_bytes: int, leaves_room: bool = False) -> int:
    """That surely run at once, of those that hold so many bytes in registers.

    leaves_room: multiprocessors for a launch of this rank that they wait for, which may come after them.
    """
    if device.type != "cuda":
        return 1  # the interpreter runs one after another
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    if leaves_room:
        return multiprocessors // 2
    return multiprocessors * programs_per_multiprocessor(num_bytes)


def programs_per_multiprocessor(num_bytes: int) -> int:
    """Of 512 threads; 64 registers each do if a program holds less than 32 KiB. Tests ask the compiler."""
    return 2 if num_bytes < 32 << 10 else 1


def split_symmetric(
    tensors: Sequence[torch.Tensor],
    rank: int,
    max_rows: int,
    width: int,
    dtype: torch.dtype,
    owner: object = None,
) -> PeerSets:
    """The sets in the ranks' symmetric memory, uint8 [symmetric_bytes(...)] each, made EMPTY by its owner."""
    shape = (NUM_SETS, len(tensors), max_rows, width)
    first, second = zip(*(tensor.view(dtype).view(shape) for tensor in tensors), strict=True)
    return PeerBuffers(rank, first, owner), PeerBuffers(rank, second, owner)


def symmetric_bytes(world: int, max_rows: int, width: int, dtype: torch.dtype) -> int:
    """That each rank has to share."""
    return NUM_SETS * world * max_rows * width * dtype.itemsize


@triton.jit
def send(
    own: tl.tensor,
    rows_ptrs: tl.tuple,
    to: tl.tensor,
    inside: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    TO_SELF: tl.constexpr = False,
) -> None:
    """`own` to all other ranks; `to`: where this rank's part lies in their memory [ranks, most rows, H].

    TO_SELF: to this one as well.
    """
    sent = not_empty(own)
    for peer in tl.static_range(WORLD):
        if TO_SELF or peer != RANK:
            tl.store(rows_ptrs[peer] + to, sent, mask=inside)


@triton.jit
def not_empty(own: tl.tensor) -> tl.tensor:
    """What is sent for `own`: the NaN that is EMPTY becomes another one."""
    dtype: tl.constexpr = own.dtype
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    empty = tl.full(own.shape, -1, bits)
    other_nan = tl.full(own.shape, (1 << (dtype.primitive_bitwidth - 1)) - 1, bits)
    sent = own.to(bits, bitcast=True)
    return tl.where(sent == empty, other_nan, sent).to(dtype, bitcast=True)


@triton.jit
def receive(theirs: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Elements that ranks send here, once all have come; EMPTY again behind that.

    At least as many as threads: of threads that hold one element the last would find it taken, and wait.
    """
    part = tl.load(theirs, mask=inside, other=0.0, volatile=True)
    while has_empty(part):
        part = tl.load(theirs, mask=inside, other=0.0, volatile=True)
    make_empty(theirs, inside)
    return part


@triton.jit
def has_empty(part: tl.tensor) -> tl.tensor:
    """Whether one of the elements has not come."""
    bits: tl.constexpr = tl.int32 if part.dtype.primitive_bitwidth == 32 else tl.int16
    return tl.max((part.to(bits, bitcast=True) == -1).to(tl.int32)) != 0


@triton.jit
def make_empty(theirs: tl.tensor, inside: tl.tensor) -> None:
    dtype: tl.constexpr = theirs.dtype.element_ty
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    tl.store(theirs, tl.full(theirs.shape, -1, bits).to(dtype, bitcast=True), mask=inside)


@triton.jit
def wait_for_one(theirs: tl.tensor) -> None:
    """Until an element has come: who waits for long reads no more than that one meanwhile."""
    dtype: tl.constexpr = theirs.dtype.element_ty
    bits: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 32 else tl.int16
    one = tl.load(theirs, volatile=True)
    while one.to(bits, bitcast=True) == -1:
        one = tl.load(theirs, volatile=True)
