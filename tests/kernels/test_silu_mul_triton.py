"""The GPU's gated activation against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul.reference import silu_mul as silu_mul_reference
from kernels.silu_mul.triton import silu_mul
from tests.kernels.triton_cases import DTYPES, ULP, adapter_slots, delta_of, plus, poisoned, randn


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # silu is rounded before the product: one step of it and one of the product
    torch.testing.assert_close(got.float(), want.float(), rtol=2 * ULP[want.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (4, 1025), (300, 100)])
@pytest.mark.parametrize("with_delta", [False, True])
def test_equals_the_reference(num_rows: int, width: int, with_delta: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = randn(num_rows, 2 * width, dtype=dtype, scale=4)
    slots = adapter_slots(num_rows)
    delta = delta_of(gate_up, slots)
    out = poisoned(num_rows, width, dtype=dtype)
    if with_delta:
        assert silu_mul(gate_up, delta, slots, out) is out
        close(out, silu_mul_reference(plus(gate_up, delta, slots)))
    else:
        assert silu_mul(gate_up, out=out) is out
        close(out, silu_mul_reference(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; infinity is right
def test_far_out_gates_stay_finite() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 3.0, 3.0]], device=randn(1).device)
    close(silu_mul(gate_up), silu_mul_reference(gate_up))
