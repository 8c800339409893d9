"""The CPU op: decodes of similar length in one padded product, each prefill by itself.

What depends only on the batch (rows, masks, padding) is planned once a step and used by every layer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one query each, padded to the longest: B sequences of P pages."""

    rows: torch.Tensor  # [B] int64, rows of q
    pages: torch.Tensor  # [B, P] int64
    padding: torch.Tensor  # int64, padded positions among B * P * page_tokens
    mask: torch.Tensor  # [B, 1, 1, P * page_tokens] of q's dtype: 0 or -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int
    end: int
    pages: torch.Tensor  # [P] int64
    context_len: int
    mask: torch.Tensor | None  # [end - start, context_len] of q's dtype; None: no cached prefix


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


def plan_attention(
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    page_tokens: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """Arguments as in the reference; `dtype` is that of the queries."""
    lens: list[int] = context_lens.tolist()
    bounds: list[int] = cu_query_lens.tolist()
    groups: dict[int, list[int]] = defaultdict(list)
    prefills = []
    for s, context_len in enumerate(lens):
        start, end = bounds[s], bounds[s + 1]
        num_pages = -(-context_len // page_tokens)
        if end - start == 1:
            # within a group no sequence is padded to more than twice its pages
            groups[num_pages.bit_length()].append(s)
        else:
            mask = None
            if end - start < context_len:
                mask = _causal_mask(end - start, context_len, dtype)
            prefills.append(_Prefill(start, end, page_table[s, :num_pages], context_len, mask))
    decodes = [
        _decode_group(members, lens, bounds, page_table, page_tokens, dtype) for members in groups.values()
    ]
    return AttentionPlan(tuple(decodes), tuple(prefills))


def paged_attention(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """The contract of kernels.paged_attention.reference."""
    out = torch.empty_like(q)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], kv_pages, layer, group)
    for prefill in plan.prefills:
        out[prefill.start : prefill.end] = _prefill(q, kv_pages, layer, prefill)
    return out


def _decode_group(
    members: list[int],
    lens: list[int],
    bounds: list[int],
    page_table: torch.Tensor,
    page_tokens: int,
    dtype: torch.dtype,
) -> _DecodeGroup:
    index = torch.tensor(members)
    context_lens = torch.tensor([lens[s] for s in members])
    num_pages = -(-int(context_lens.max()) // page_tokens)
    is_padding = torch.arange(num_pages * page_tokens) >= context_lens[:, None]
    mask = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, -torch.inf)
    return _DecodeGroup(
        rows=torch.tensor([bounds[s] for s in members]),
        pages=page_table[index, :num_pages],
        padding=is_padding.flatten().nonzero().flatten(),
        mask=mask[:, None, None],
    )


def _causal_mask(num_queries: int, context_len: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.full((num_queries, context_len), -torch.inf, dtype=dtype)
    return mask.triu_(context_len - num_queries + 1)


def _gather(kv_pages: torch.Tensor, layer: int, pages: torch.Tensor) -> torch.Tensor:
    """K and V of pages, copied: [2, pages, page_tokens, KH, D]."""
    num_layers = kv_pages.shape[1]
    rows = pages * (2 * num_layers) + 2 * layer
    # one contiguous row per (page, layer, K|V): a plain row copy, several times faster than 3-d indexing
    flat = kv_pages.view(-1, kv_pages[0, 0, 0].numel())
    return flat.index_select(0, torch.cat((rows, rows + 1))).view(2, -1, *kv_pages.shape[3:])


def _decode(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, group: _DecodeGroup) -> torch.Tensor:
    num_seqs, _, head_dim = q.shape
    num_kv_heads = kv_pages.shape[4]
    kv = _gather(kv_pages, layer, group.pages.flatten())
    # -inf in the mask does not stop a NaN, so that padding is zeroed as well
    kv.view(2, -1, num_kv_heads * head_dim).index_fill_(1, group.padding, 0)
    k, v = kv.view(2, num_seqs, -1, num_kv_heads, head_dim).transpose(2, 3)
    # the query heads of one KV head act as its queries: K and V are not repeated
    grouped = q.view(num_seqs, num_kv_heads, -1, head_dim)
    return torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask).reshape(
        q.shape
    )


def _prefill(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, prefill: _Prefill) -> torch.Tensor:
    kv = _gather(kv_pages, layer, prefill.pages).flatten(1, 2)[:, : prefill.context_len]
    k, v = kv.transpose(1, 2).unsqueeze(1)  # [1, KH, context, D]
    queries = q[prefill.start : prefill.end].transpose(0, 1).unsqueeze(0)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries,
        k,
        v,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
