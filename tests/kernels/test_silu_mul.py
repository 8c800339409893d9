"""The gated activation over a fused gate and up row."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import silu_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_half_gates_second_half(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype)
    want = (gate.float() * torch.sigmoid(gate.float())).to(dtype) * up
    got = silu_mul(torch.cat((gate, up), dim=-1))
    torch.testing.assert_close(got, want)
