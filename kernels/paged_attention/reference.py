"""Attention over paged keys and values (Kwon et al., 2023, arXiv:2309.06180), prefill and decode alike.

The last query_len[s] positions of sequence s are this step's queries; their keys and values are already
written. Query i of sequence s sees positions 0 .. context_lens[s] - query_len[s] + i.

q [T, H, D]               queries of all sequences, one after the other
kv_pages [N, L, 2, page_tokens, KH, D]   H a multiple of KH: query head h reads KV head h // (H / KH)
page_table [S, P] int64   pages of a sequence in order; entries past its last page are ignored
context_lens [S], cu_query_lens [S + 1] int64
returns [T, H, D], new    fp32 inside; what lies in a page past context_lens (NaN too) has no influence
"""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
) -> torch.Tensor:
    page_tokens, num_kv_heads, head_dim = kv_pages.shape[3:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    bounds = cu_query_lens.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        start, end = bounds[s], bounds[s + 1]
        pages = page_table[s, : -(-context_len // page_tokens)]
        kv = kv_pages[pages, layer].transpose(0, 1).flatten(1, 2)[:, :context_len]  # [2, context, KH, D]
        k, v = kv.float().repeat_interleave(group, dim=2)  # [context, H, D]
        scores = torch.einsum("qhd,chd->hqc", q[start:end].float(), k) * head_dim**-0.5
        positions = torch.arange(context_len - (end - start), context_len, device=q.device)
        future = torch.arange(context_len, device=q.device) > positions[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqc,chd->qhd", weights, v).to(q.dtype)
    return out
