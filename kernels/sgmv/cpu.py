"""The CPU op: the reference with all offsets resolved when an adapter becomes resident.

A step runs (segments x 7 projections x layers) of these products; reading offset tables in between would
cost more than the products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.sgmv.table import RANK_BLOCK, ColumnSlice, Segment
from kernels.sgmv.views import SlotViews

# A product of fewer rows takes 3 us on one thread and 11 us on two; switching costs 0.1 us.
_PARALLEL_ROWS = 64


class _Module(NamedTuple):
    """One adapted projection: its rank in runs of rows that are contiguous in the pool."""

    runs: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (A.T [in, rows], B.T [rows, out])
    scale: float


class AdapterViews(SlotViews[_Module]):
    def _module(self, projection: int, offsets: list[list[int]], rank: int, scale: float) -> _Module:
        in_features, out_features = self._widths[projection]
        runs: list[list[int]] = []  # [A offset, B offset, rows]
        for block, row in enumerate(range(0, rank, RANK_BLOCK)):
            a, b, rows = offsets[0][block], offsets[1][block], min(RANK_BLOCK, rank - row)
            last = runs[-1] if runs else None
            if last and last[0] + last[2] * in_features == a and last[1] + last[2] * out_features == b:
                last[2] += rows
            else:
                runs.append([a, b, rows])
        return _Module(
            tuple(
                (self._view(a, rows, in_features).T, self._view(b, rows, out_features)) for a, b, rows in runs
            ),
            scale,
        )


def sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    segments: Sequence[Segment],
    adapters: AdapterViews,
    layer: int,
    slices: Sequence[ColumnSlice],
) -> None:
    """The contract of kernels.sgmv.reference."""
    num_threads = torch.get_num_threads()
    try:
        for slot, start, end in segments:
            if slot < 0:
                continue
            torch.set_num_threads(num_threads if end - start >= _PARALLEL_ROWS else 1)
            modules = adapters.layer(slot, layer)
            x_segment, y_segment = x[start:end], y[start:end]
            for projection, first, last in slices:
                module = modules[projection]
                if module is not None:
                    _add_delta(y_segment[:, first:last], x_segment, module)
    finally:
        torch.set_num_threads(num_threads)


def _add_delta(y: torch.Tensor, x: torch.Tensor, module: _Module) -> None:
    if y.dtype == torch.float32:
        for a, b in module.runs:
            y.addmm_(x.mm(a), b, alpha=module.scale)
        return
    wide_x, wide_y = x.float(), y.float()
    for a, b in module.runs:
        wide_y.addmm_(wide_x.mm(a.float()), b.float(), alpha=module.scale)
    y.copy_(wide_y)
