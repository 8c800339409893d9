"""Adapters of which each rank of a group holds 1/N: what is held and exchanged, and the CPU op.

After S-LoRA (Sheng et al., 2023, arXiv:2311.03285), section 6. The base's weight is split by output or by
input, and B or A with it. The other side's rows, as many as the adapter's rank, are dealt to the ranks in
turn: row j is number j // N on rank j % N, whatever an adapter's rank is, and each has `each` = rank / N of
them, rounded up, or one less. What the ranks exchange is as narrow as that:

    by output:  h_own  [T, each] = x     @ A_own.T   all-gather      h     [T, rank]   y_own  += h     @ B_own
    by input:   h_part [T, rank] = x_own @ A_own.T   reduce-scatter  h_own [T, each]   y_part += h_own @ B_own

S-LoRA takes an all-reduce for the second one and cuts B by output. The reduce-scatter is half of that, and
is enough if B is dealt out too: then the ranks' y_part, which the base sums up anyway, hold the delta
together. One collective for all segments and all projections that share an input: four a layer (q k v; o;
gate up; down); on a CPU none where no segment has an adapter for them. h is exchanged in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.sgmv.table import RANK_BLOCK, ColumnSlice, Segment
from kernels.sgmv.views import SlotViews


class Exchange(Protocol):
    def gather_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Of each rank its [size], in order of rank: [N, size]."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' [N, size]; each rank gets its row: [size]."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the ranks of a group hold adapters together."""

    rank: int
    world: int
    by_output: tuple[bool, ...]  # of each projection: how the base's weight is split
    exchange: Exchange

    def own_rows(self, rank: int) -> int:
        """Of the `rank` rows that were dealt."""
        return (rank + self.world - 1 - self.rank) // self.world

    def most_rows(self, rank: int) -> int:
        """Of any rank of the group."""
        return -(-rank // self.world)


def exchange(planes: torch.Tensor, split: Split, by_output: bool) -> torch.Tensor:
    """For the GPU's op: what A leaves in planes [splits, T, slices x ranks], as B takes it, with one plane.

    by output: `ranks` are one rank's own rows, and become all. by input: all rows, of which each rank has the
    sum over a part of K, and become its own. The shapes are a plan's, so that a graph can capture it; columns
    that no A has written may hold anything, and no B reads what becomes of them.
    """
    _, num_tokens, columns = planes.shape
    sums = planes.sum(0)
    if by_output:
        parts = split.exchange.gather_parts(sums.flatten())
        return parts.T.reshape(1, num_tokens, columns * split.world)
    parts = sums.view(-1, split.world).T.contiguous()
    return split.exchange.reduce_scatter(parts).view(1, num_tokens, -1)


@dataclass(frozen=True, slots=True)
class _Module:
    """One adapted projection. Tiles are views of the pool, each with the number of its first row here."""

    a: tuple[tuple[int, torch.Tensor], ...]  # [rows, in]
    b: tuple[tuple[int, torch.Tensor], ...]  # [rows, out]
    each: int  # rows that the first rank was dealt: the others have as many or one less
    scale: float


class SplitViews(SlotViews[_Module]):
    """`put` takes the ranks of the whole adapter."""

    def __init__(
        self,
        pool: torch.Tensor,
        widths: Sequence[tuple[int, int]],
        split: Split,
    ) -> None:
        """`widths[p]` = (in, out) features of projection p on this rank."""
        super().__init__(pool, widths)
        self.split = split

    def _module(self, projection: int, offsets: list[list[int]], rank: int, scale: float) -> _Module:
        own = self.split.own_rows(rank)
        num_rows = (own, rank) if self.split.by_output[projection] else (rank, own)
        a, b = (
            tuple(
                (row, self._view(offset, min(RANK_BLOCK, rows - row), width))
                for row, offset in zip(range(0, rows, RANK_BLOCK), side, strict=False)
            )
            for rows, side, width in zip(num_rows, offsets, self._widths[projection], strict=True)
        )
        return _Module(a, b, -(-rank // self.split.world), scale)


@dataclass(frozen=True, slots=True)
class _Block:
    """A segment's part in the exchange for one projection: [num_tokens, each] from `offset`."""

    module: _Module
    segment: slice  # tokens
    columns: slice  # of y
    offset: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.offset + self.num_tokens * self.module.each

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """View of [size]: [num_tokens, each]."""
        return part[self.offset : self.stop].view(self.num_tokens, self.module.each)

    def all(self, parts: torch.Tensor) -> torch.Tensor:
        """View of [N, size]: [num_tokens, each, N], which is the order of the rows."""
        block = parts[:, self.offset : self.stop].view(len(parts), self.num_tokens, self.module.each)
        return block.permute(1, 2, 0)


def split_sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    adapters: SplitViews,
    layer: int,
    slices: Sequence[ColumnSlice],
) -> None:
    """As kernels.sgmv.reference, on this rank's part of `x` or `y`; all ranks must call it alike."""
    blocks = _blocks(segments, adapters, layer, slices)
    if not blocks:
        return
    size = blocks[-1].stop
    split = adapters.split
    by_output = split.by_output[slices[0].projection]
    # zeros: where a rank was dealt one row less, nothing is written
    shape = (size,) if by_output else (split.world, size)
    hidden = torch.zeros(shape, dtype=torch.float32)
    for block in blocks:
        width = block.module.each if by_output else block.module.each * split.world
        shrunk = torch.zeros(block.num_tokens, width)
        _shrink(shrunk, x[block.segment], block.module)
        if by_output:
            block.own(hidden).copy_(shrunk)
        else:
            block.all(hidden).copy_(shrunk.view(block.num_tokens, -1, split.world))
    hidden = split.exchange.gather_parts(hidden) if by_output else split.exchange.reduce_scatter(hidden)
    for block in blocks:
        h = block.all(hidden).flatten(1) if by_output else block.own(hidden)
        _expand(y[block.segment, block.columns], h, block.module)


def _blocks(
    segments: Sequence[Segment], adapters: SplitViews, layer: int, slices: Sequence[ColumnSlice]
) -> list[_Block]:
    blocks = []
    offset = 0
    for slot, start, end in segments:
        if slot < 0:
            continue
        modules = adapters.layer(slot, layer)
        for projection, first, last in slices:
            module = modules[projection]
            if module is not None:
                block = _Block(module, slice(start, end), slice(first, last), offset, end - start)
                offset = block.stop
                blocks.append(block)
    return blocks


def _shrink(h: torch.Tensor, x: torch.Tensor, module: _Module) -> None:
    wide = x.float()
    for row, a in module.a:
        h[:, row : row + len(a)] = wide @ a.float().T


def _expand(y: torch.Tensor, h: torch.Tensor, module: _Module) -> None:
    wide = y.float()  # y itself, if that is float32
    for row, b in module.b:
        wide.addmm_(h[:, row : row + len(b)], b.float(), alpha=module.scale)
    if wide is not y:
        y.copy_(wide)
