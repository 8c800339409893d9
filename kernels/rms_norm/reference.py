"""RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467), rounded where Llama rounds. Also the CPU op.

out[t] = weight * cast(x[t] / sqrt(mean(x[t]^2) + eps))     statistics in fp32, cast to x's dtype
x [T, H]   weight [H]   out [T, H], new
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * inverse_rms).to(x.dtype)
