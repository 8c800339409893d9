"""y[t] += delta[t] where slots[t] >= 0, in place, rounded to the dtype; elsewhere delta is not read.

y, delta [T, E]   slots [T] int32: the adapter slot of each row, -1: none
"""

from __future__ import annotations

import torch


def add_delta(y: torch.Tensor, delta: torch.Tensor, slots: torch.Tensor) -> None:
    y.copy_(torch.where((slots >= 0)[:, None], y + delta, y))
