"""What stands for memory that ranks share: that of processes in the interpreter, of streams on one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
import triton
import triton.language as tl

from kernels.linear.tiles import Tile
from kernels.linear.triton import small_linear
from kernels.peers.triton import (
    EMPTY,
    NUM_SETS,
    PeerBuffers,
    PeerSets,
    SendArguments,
    send,
    split_symmetric,
    symmetric_bytes,
)
from tests.kernels.triton_cases import DEVICE

T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    def run(self, rank: int, peers: PeerBuffers) -> T_co: ...


_TILE = Tile(rows=16, columns=32, block_k=64, weight_first=True, num_stages=2)


def shared_sets(world: int, max_rows: int, width: int, dtype: torch.dtype = torch.float32) -> list[PeerSets]:
    """Of each rank, in memory that forked processes share, or of one GPU."""
    nbytes = symmetric_bytes(world, max_rows, width, dtype)
    memory = [torch.full((nbytes,), EMPTY, dtype=torch.uint8, device=DEVICE) for _ in range(world)]
    if DEVICE == "cpu":
        for tensor in memory:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    return [split_symmetric(memory, rank, max_rows, width, dtype) for rank in range(world)]


def are_empty(sets: list[PeerSets]) -> bool:
    return all(bool((rows.view(torch.uint8) == EMPTY).all()) for peers in sets[0] for rows in peers.rows)


def run_alone(call: Call[object], rank: int, *all_sets: list[PeerSets]) -> None:
    """As if all others had been here, to compile it: who compiles holds up launches that others wait for.

    `all_sets`: that the call uses; it is given one of the first.
    """
    for sets in all_sets:
        sets[rank][0].rows[rank].zero_()
    call.run(rank, all_sets[0][rank][0])
    for peers in itertools.chain(*(sets[0] for sets in all_sets)):
        for rows in peers.rows:
            rows.view(torch.uint8).fill_(EMPTY)


def run_in_streams(calls: Sequence[Call[T_co]], sets: list[PeerSets]) -> list[list[T_co]]:
    """Of each call what each rank has, every rank on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in sets]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    results: list[list[T_co]] = []
    for i, call in enumerate(calls):
        results.append([])
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[-1].append(call.run(rank, sets[rank][i % NUM_SETS]))
    torch.cuda.synchronize()
    return results


def compute_and_send(y: torch.Tensor, peers: PeerBuffers) -> torch.Tensor:
    """A linear that gives y; up to 16 rows."""
    identity = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
    return small_linear(y, identity, _TILE, torch.empty_like(y), peers=peers)


def can_compute(dtype: torch.dtype) -> bool:
    """Exactly: tensor cores round float32 before they multiply by one."""
    return DEVICE == "cpu" or dtype != torch.float32


def send_rows(rows: torch.Tensor, slots: torch.Tensor, peers: PeerBuffers) -> None:
    """Of `rows` [T, H] those that have an adapter, as an expand does."""
    sending = SendArguments.of(peers, rows)
    width = rows.shape[1]
    _send_rows_kernel[(len(rows),)](
        rows,
        slots,
        sending.rows,
        sending.max_rows,
        width,
        RANK=sending.rank,
        WORLD=sending.world,
        BLOCK=triton.next_power_of_2(width),
    )


@triton.jit(do_not_specialize=["max_rows"])  # type: ignore[untyped-decorator]
def _send_rows_kernel(
    own_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    rows_ptrs: tl.tuple,
    max_rows: tl.tensor,
    width: tl.tensor,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
    own = tl.load(own_ptr + row * width + columns, mask=inside, other=0.0)
    send(own, rows_ptrs, (RANK * max_rows + row) * width + columns, inside, RANK, WORLD, TO_SELF=True)
