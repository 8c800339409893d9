"""Deltas of adapters, added to the rows that have one."""

from __future__ import annotations

import pytest
import torch

from kernels.add_delta.reference import add_delta as add_delta_reference
from kernels.add_delta.triton import add_delta
from tests.kernels.triton_cases import DTYPES, adapter_slots, delta_of, plus, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 64), (9, 1025)])
def test_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    y = randn(num_rows, width, dtype=dtype)
    slots = adapter_slots(num_rows)
    delta = delta_of(y, slots)
    want = plus(y, delta, slots)
    by_reference = y.clone()
    add_delta_reference(by_reference, delta, slots)
    torch.testing.assert_close(by_reference, want, rtol=0, atol=0)
    add_delta(y, delta, slots)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
