"""RMSNorm as Llama computes it."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(7, 48) * 30).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
