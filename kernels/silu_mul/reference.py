"""SwiGLU's activation (Shazeer, 2020, arXiv:2002.05202). Also the CPU op.

out[t] = silu(gate_up[t, :I]) * gate_up[t, I:]
gate_up [T, 2 I]   out [T, I], new; rounded to the dtype after silu, as Llama does
"""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
