"""The end of a row-parallel linear: partial outputs summed over the ranks, added to the residual, normed.

part_r[t]   = y_r[t] + delta_r[t]                    rounded; delta only where slots[t] >= 0
residual[t] = residual[t] + sum over r of part_r[t]  in fp32, by rank; rounded before the add
out[t]      = rms_norm(residual[t])                  as of kernels.rms_norm

y_r, delta_r, residual, out [T, H] of one dtype   slots [T] int32   weight [H]

Every rank does the same sums in the same order, so that residuals are bit for bit equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.rms_norm.reference import rms_norm


def all_reduce_add_rms_norm(
    residual: torch.Tensor,
    ys: Sequence[torch.Tensor],
    deltas: Sequence[torch.Tensor] | None,
    slots: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual, out), both new. `ys`, `deltas`: of each rank, in order."""
    parts = list(ys)
    if deltas is not None:
        assert slots is not None
        has_adapter = (slots >= 0)[:, None]
        parts = [torch.where(has_adapter, y + delta, y) for y, delta in zip(ys, deltas, strict=True)]
    total = torch.zeros_like(residual, dtype=torch.float32)
    for part in parts:
        total += part.float()
    residual = (residual.float() + total.to(residual.dtype).float()).to(residual.dtype)
    return residual, rms_norm(residual, weight, eps)
