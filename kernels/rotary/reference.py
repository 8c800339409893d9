"""Rotary embedding (Su et al., 2021, arXiv:2104.09864) in the half-split convention, fused with the KV write.

rot(x) = x * cos + swap(x) * sin      swap(x)[i] = -x[i + D/2] for i < D/2, else x[i - D/2]
qkv [T, (H + 2 KH) D]     one row holds H query heads, KH key heads, KH value heads
cos, sin [T, D]           fp32, of the token's position
kv_pages [N, L, 2, page_tokens, KH, D]   written in place: rot(k) and v of token t at kv_slots[t]
kv_slots [T] int64        page * page_tokens + offset in the page; distinct
returns rot(q) [T, H, D], new; computed in fp32, rounded once to qkv's dtype

Also the CPU op.
"""

from __future__ import annotations

import torch


def rotary_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    kv_slots: torch.Tensor,
) -> torch.Tensor:
    page_tokens, num_kv_heads, head_dim = kv_pages.shape[3:]
    heads = qkv.view(len(qkv), -1, head_dim)  # [T, H + 2 KH, D]
    q_and_k, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
    # queries and keys are neighbours in the row: one rotation for both
    rotated = _rotate(q_and_k.float(), cos.unsqueeze(1), sin.unsqueeze(1)).to(qkv.dtype)
    page_ids = kv_slots // page_tokens
    offsets = kv_slots % page_tokens
    kv_pages[page_ids, layer, 0, offsets] = rotated[:, -num_kv_heads:]
    kv_pages[page_ids, layer, 1, offsets] = v
    return rotated[:, :-num_kv_heads]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
