"""Embedding lookup: tokens of the host, and tokens that an earlier step has left on the device."""

from __future__ import annotations

import pytest
import torch

from kernels.embedding.reference import embed as embed_reference
from kernels.embedding.triton import embed
from tests.kernels.triton_cases import DEVICE, DTYPES, randn


def test_a_negative_id_names_a_place_among_the_sampled_tokens() -> None:
    weight = torch.arange(12.0).view(6, 2)
    sampled = torch.tensor([5, 3])
    rows = embed_reference(torch.tensor([4, -1, -2]), sampled, weight)
    assert rows.tolist() == [[8.0, 9.0], [10.0, 11.0], [6.0, 7.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 8), (1, 64), (9, 2049)])
def test_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    weight = randn(40, width, dtype=dtype)
    token_ids = torch.randint(-5, 40, (num_rows,)).to(DEVICE)
    sampled = torch.randint(40, (5,)).to(DEVICE)
    want = embed_reference(token_ids, sampled, weight)
    torch.testing.assert_close(embed(token_ids, sampled, weight), want, rtol=0, atol=0)
