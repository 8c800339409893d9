"""y = x W^T with W [out, in] packed once for oneDNN, where PyTorch has it and W is fp32.

Decode reads every weight for a few rows of x; PyTorch's plain fp32 path (MKL) is up to twice as slow there.
The packed form is what PyTorch's own compiler gives frozen weights. New row counts cost a few ms each, once.
"""

from __future__ import annotations

import torch


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """For `linear` only; a copy, or the weight itself where packing does not apply."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in], weight from pack_weight -> [T, out]."""
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return y
    return torch.nn.functional.linear(x, weight)
