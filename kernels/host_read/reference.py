"""out = source, where `source` is in host memory and `out` where the step runs. Also the CPU op.

Both contiguous, of the same number of bytes, a multiple of 4.
"""

from __future__ import annotations

import torch


def read_host(source: torch.Tensor, out: torch.Tensor) -> None:
    out.view(torch.uint8).view(-1).copy_(source.view(torch.uint8).view(-1))
