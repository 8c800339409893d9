"""Packed base linears equal plain ones."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear, pack_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 7, 133])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 256), (576, 960), (40, 24)])
def test_equals_a_plain_product(
    num_rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, in_features), torch.randn(out_features, in_features)
    got = linear(x.to(dtype), pack_weight(weight.to(dtype)))
    want = x.to(dtype).double() @ weight.to(dtype).double().T
    assert got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.3  # sums of up to 576 unit products
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=1e-2)


def test_a_weight_that_needs_no_packing_is_not_copied() -> None:
    weight = torch.randn(8, 8, dtype=torch.bfloat16)
    assert pack_weight(weight) is weight
