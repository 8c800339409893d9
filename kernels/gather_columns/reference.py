"""The parts of a column-parallel linear's output, side by side.

out[t, r * W + c] = own_r[t, c]     own_r [T, W] of rank r, out [T, ranks x W]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """New; `parts`: of each rank, in order."""
    return torch.cat(list(parts), dim=1)
