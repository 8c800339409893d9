"""What the tests of Triton kernels share: where they run, in which dtypes, and LoRA deltas of some rows."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: in Triton's interpreter

DTYPES = [
    torch.float32,
    torch.float16,
    # tl.dot of bf16 is silently wrong in the interpreter
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]

ULP = {torch.float32: 2e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Relative; of a result rounded once where the order of a sum may differ."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """The same numbers on every device."""
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def adapter_slots(num_rows: int) -> torch.Tensor:
    """[T] int32: every third row has no adapter."""
    slots = torch.arange(num_rows, dtype=torch.int32) % 5
    slots[::3] = -1
    return slots.to(DEVICE)


def delta_of(y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """NaN where no kernel may look."""
    delta = randn(*y.shape, dtype=y.dtype)
    delta[slots < 0] = torch.nan
    return delta


def plus(y: torch.Tensor, delta: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """y + delta on the rows with an adapter, rounded to the dtype."""
    return torch.where(slots[:, None] >= 0, y + delta, y)
