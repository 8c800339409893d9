"""The CPU op: decodes of similar length in one padded product, each prefill by itself.

What depends only on the batch (rows to gather, masks, padding) is planned once a step for all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class _PageGather:
    """Copies K and V of some pages, of any layer, into one buffer.

    The buffer serves all layers of a step: fresh memory would cost more in page faults than the copy.
    """

    def __init__(self, kv_pages: torch.Tensor, pages: torch.Tensor) -> None:
        rows_per_page = kv_pages.shape[1] * 2  # one contiguous row per layer and K|V
        self._rows = torch.cat((pages * rows_per_page, pages * rows_per_page + 1))
        self._shape = (2, -1, *kv_pages.shape[4:])
        self._buffer = kv_pages.new_empty(2 * len(pages), kv_pages[0, 0, 0].numel())

    def __call__(self, kv_pages: torch.Tensor, layer: int) -> torch.Tensor:
        """[2, pages * page_tokens, KH, D], valid until the next call."""
        flat = kv_pages.view(-1, self._buffer.shape[1])
        torch.index_select(flat, 0, self._rows + 2 * layer, out=self._buffer)
        return self._buffer.view(self._shape)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """B sequences with one query each, padded to C positions, those of the longest one's pages."""

    rows: torch.Tensor  # [B] int64, rows of q
    gather: _PageGather
    padding: torch.Tensor  # int64, padded ones among the B * C positions
    mask: torch.Tensor  # [B, 1, 1, C] of q's dtype: 0 or -inf


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int  # rows of q
    end: int
    gather: _PageGather
    context_len: int
    mask: torch.Tensor | None  # [end - start, context_len] of q's dtype; None: no cached prefix


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


def plan_attention(
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
) -> AttentionPlan:
    """Arguments as in the reference. A plan holds scratch memory: one forward pass at a time uses it."""
    page_tokens = kv_pages.shape[3]
    lens: list[int] = context_lens.tolist()
    bounds: list[int] = cu_query_lens.tolist()
    decodes: dict[int, list[int]] = defaultdict(list)
    prefills = []
    for s, context_len in enumerate(lens):
        start, end = bounds[s], bounds[s + 1]
        num_pages = -(-context_len // page_tokens)
        if end - start == 1:
            # within a group no sequence is padded to more than twice its pages
            decodes[num_pages.bit_length()].append(s)
        else:
            gather = _PageGather(kv_pages, page_table[s, :num_pages])
            mask = (
                None if end - start == context_len else _causal_mask(end - start, context_len, kv_pages.dtype)
            )
            prefills.append(_Prefill(start, end, gather, context_len, mask))
    groups = tuple(
        _decode_group(kv_pages, page_table[members], [lens[s] for s in members], [bounds[s] for s in members])
        for members in decodes.values()
    )
    return AttentionPlan(groups, tuple(prefills))


def paged_attention(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, plan: AttentionPlan) -> torch.Tensor:
    """The contract of kernels.paged_attention.reference."""
    out = torch.empty_like(q)
    for group in plan.decodes:
        out[group.rows] = _decode(q[group.rows], kv_pages, layer, group)
    for prefill in plan.prefills:
        rows = slice(prefill.start, prefill.end)
        out[rows] = _prefill(q[rows], kv_pages, layer, prefill)
    return out


def _decode_group(
    kv_pages: torch.Tensor, page_table: torch.Tensor, context_lens: Sequence[int], rows: Sequence[int]
) -> _DecodeGroup:
    page_tokens = kv_pages.shape[3]
    num_pages = -(-max(context_lens) // page_tokens)
    is_padding = torch.arange(num_pages * page_tokens) >= torch.tensor(context_lens)[:, None]
    mask = torch.zeros(is_padding.shape, dtype=kv_pages.dtype).masked_fill_(is_padding, -torch.inf)
    return _DecodeGroup(
        rows=torch.tensor(rows),
        gather=_PageGather(kv_pages, page_table[:, :num_pages].flatten()),
        padding=is_padding.flatten().nonzero().flatten(),
        mask=mask[:, None, None],
    )


def _causal_mask(num_queries: int, context_len: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.full((num_queries, context_len), -torch.inf, dtype=dtype)
    return mask.triu_(context_len - num_queries + 1)


def _decode(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, group: _DecodeGroup) -> torch.Tensor:
    num_kv_heads, head_dim = kv_pages.shape[4:]
    kv = group.gather(kv_pages, layer)
    # -inf in the mask does not stop a NaN, so that padding is zeroed as well
    kv.index_fill_(1, group.padding, 0)
    k, v = kv.view(2, len(q), -1, num_kv_heads, head_dim).transpose(2, 3)
    # the query heads of one KV head act as its queries: K and V are not repeated
    grouped = q.view(len(q), num_kv_heads, -1, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask)
    return out.reshape(q.shape)


def _prefill(q: torch.Tensor, kv_pages: torch.Tensor, layer: int, prefill: _Prefill) -> torch.Tensor:
    kv = prefill.gather(kv_pages, layer)[:, : prefill.context_len]
    k, v = kv.transpose(1, 2).unsqueeze(1)  # [1, KH, context, D]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
