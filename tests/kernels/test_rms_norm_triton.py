"""The GPU's RMSNorm against the reference, alone and behind residual and LoRA adds."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm.reference import rms_norm as rms_norm_reference
from kernels.rms_norm.triton import add_rms_norm, rms_norm
from tests.kernels.triton_cases import DTYPES, ULP, adapter_slots, delta_of, plus, poisoned, randn

EPS = 1e-5


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # rounded before the weight and behind it
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * ULP[want.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 200), (7, 1), (5, 4096)])
def test_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_rows)
    x, weight = randn(num_rows, width, dtype=dtype, scale=30), randn(width, dtype=dtype)
    out = poisoned(num_rows, width, dtype=dtype)
    assert rms_norm(x, weight, EPS, out) is out
    close(out, rms_norm_reference(x, weight, EPS))
    close(rms_norm(x, weight, EPS), out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (6, 200), (5, 4096)])
@pytest.mark.parametrize("with_delta", [False, True])
def test_adds_to_the_residual_first(num_rows: int, width: int, with_delta: bool, dtype: torch.dtype) -> None:
    """The residual exactly; what has no adapter never meets the delta, which is NaN there."""
    torch.manual_seed(num_rows)
    residual, x = randn(num_rows, width, dtype=dtype, scale=30), randn(num_rows, width, dtype=dtype)
    weight = randn(width, dtype=dtype)
    slots = adapter_slots(num_rows)
    delta = delta_of(x, slots)
    want_residual = residual + (plus(x, delta, slots) if with_delta else x)
    if with_delta:
        out = add_rms_norm(residual, x, weight, EPS, delta, slots)
    else:
        out = add_rms_norm(residual, x, weight, EPS)
    assert torch.equal(residual, want_residual)
    close(out, rms_norm_reference(want_residual, weight, EPS))


def test_no_rows() -> None:
    assert rms_norm(randn(0, 64), randn(64), EPS).shape == (0, 64)
