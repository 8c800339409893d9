"""The GPU's rotation and KV write against the reference, over permuted slots of a poisoned pool."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary.reference import rotary_kv_write as rotary_kv_write_reference
from kernels.rotary.triton import rotary_kv_write
from tests.kernels.triton_cases import DEVICE, DTYPES, ULP, adapter_slots, delta_of, plus, poisoned, randn

NUM_LAYERS, PAGE_TOKENS = 3, 16


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    # rotated values are differences: an error is relative to the terms, which are about 1
    torch.testing.assert_close(
        got.float(), want.float(), rtol=ULP[want.dtype], atol=ULP[want.dtype], equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 24), (32, 8, 128), (4, 4, 64)]
)
@pytest.mark.parametrize(("num_tokens", "with_delta"), [(1, False), (7, True), (7, False)])
def test_equals_the_reference(
    num_tokens: int, with_delta: bool, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    num_pages = 1 + -(-num_tokens // PAGE_TOKENS)
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = randn(num_tokens, head_dim // 2, scale=9).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    kv_slots = torch.randperm(num_pages * PAGE_TOKENS)[:num_tokens].to(DEVICE)
    row_slots = adapter_slots(num_tokens)
    delta = delta_of(qkv, row_slots)
    shape = (num_pages, NUM_LAYERS, 2, PAGE_TOKENS, num_kv_heads, head_dim)
    kv_pages, want_pages = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype)

    if with_delta:
        got = rotary_kv_write(qkv, cos, sin, kv_pages, 1, kv_slots, delta, row_slots)
        qkv = plus(qkv, delta, row_slots)
    else:
        got = rotary_kv_write(qkv, cos, sin, kv_pages, 1, kv_slots)

    close(got, rotary_kv_write_reference(qkv, cos, sin, want_pages, 1, kv_slots))
    close(kv_pages, want_pages)  # NaN where nothing was to be written


def test_many_rows_and_padding_rows_that_write_nothing() -> None:
    """More rows than one block size serves; the slot of a padding row is -1."""
    torch.manual_seed(0)
    num_tokens, num_pages = 300, 20
    qkv = randn(num_tokens, (2 + 2) * 8)
    angles = randn(num_tokens, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    kv_slots = torch.randperm(num_pages * PAGE_TOKENS)[:num_tokens].to(DEVICE)
    kv_slots[::7] = -1
    real = kv_slots >= 0
    kv_pages, want_pages = (poisoned(num_pages, NUM_LAYERS, 2, 16, 1, 8, dtype=qkv.dtype) for _ in range(2))
    out = poisoned(num_tokens, 2, 8, dtype=qkv.dtype)
    assert rotary_kv_write(qkv, cos, sin, kv_pages, 2, kv_slots, out=out) is out
    want = rotary_kv_write_reference(qkv[real], cos[real], sin[real], want_pages, 2, kv_slots[real])
    close(out[real], want)
    close(kv_pages, want_pages)
