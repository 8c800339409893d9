"""Rotation of queries and keys as Llama does it, and where keys and values land."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels.rotary import rotary_kv_write

HEADS, KV_HEADS, DIM = 4, 2, 8
NUM_PAGES, NUM_LAYERS, PAGE_TOKENS = 6, 3, 4
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotates_and_writes_only_its_slots(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([21, 3, 8, 0, 23])
    qkv = torch.randn(len(slots), (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    angles = torch.randn(len(slots), DIM // 2).repeat(1, 2)
    kv_pages = torch.full((NUM_PAGES, NUM_LAYERS, 2, PAGE_TOKENS, KV_HEADS, DIM), torch.nan, dtype=dtype)

    got_q = rotary_kv_write(qkv, angles.cos(), angles.sin(), kv_pages, 1, slots)

    q, k, v = (
        part.view(len(slots), -1, DIM).float()
        for part in torch.split(qkv, [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    )
    want_q, want_k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), unsqueeze_dim=1)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got_q.float(), want_q, atol=tolerance, rtol=tolerance)
    assert got_q.dtype == dtype
    for t, slot in enumerate(slots.tolist()):
        written = kv_pages[slot // PAGE_TOKENS, 1, :, slot % PAGE_TOKENS]
        torch.testing.assert_close(written[0].float(), want_k[t], atol=tolerance, rtol=tolerance)
        assert torch.equal(written[1].float(), v[t])
        written.fill_(torch.nan)
    assert kv_pages.isnan().all()
