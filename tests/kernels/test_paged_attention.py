"""The CPU op and the reference against dense attention, over permuted page tables in a poisoned pool."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kernels.paged_attention import paged_attention, plan_attention
from kernels.paged_attention.reference import paged_attention as paged_attention_reference

NUM_LAYERS = 3
HEAD_DIM = 16
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case(NamedTuple):
    q: torch.Tensor
    kv_pages: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    want: torch.Tensor  # fp32


def make_case(
    lens: list[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    page_tokens: int = 4,
    dtype: torch.dtype = torch.float32,
    layer: int = 1,
) -> Case:
    """`lens`: (query_len, context_len) of each sequence. All that is no key or value of `layer` is NaN."""
    torch.manual_seed(0)
    pages_of = [-(-context // page_tokens) for _, context in lens]
    free = torch.randperm(sum(pages_of) + 5).tolist()
    kv_pages = torch.full(
        (len(free), NUM_LAYERS, 2, page_tokens, num_kv_heads, HEAD_DIM), torch.nan, dtype=dtype
    )
    page_table = torch.zeros(len(lens), max(pages_of) + 1, dtype=torch.int64)
    queries, wants = [], []
    for s, (query_len, context_len) in enumerate(lens):
        q = torch.randn(query_len, num_heads, HEAD_DIM).to(dtype)
        kv = torch.randn(2, context_len, num_kv_heads, HEAD_DIM).to(dtype)
        pages = [free.pop() for _ in range(pages_of[s])]
        page_table[s, : len(pages)] = torch.tensor(pages)
        for t in range(context_len):
            kv_pages[pages[t // page_tokens], layer, :, t % page_tokens] = kv[:, t]
        queries.append(q)
        wants.append(dense(q, kv))
    cu_query_lens = torch.tensor([0, *(n for n, _ in lens)]).cumsum(0)
    context_lens = torch.tensor([context for _, context in lens])
    return Case(torch.cat(queries), kv_pages, page_table, context_lens, cu_query_lens, torch.cat(wants))


def dense(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """One query at a time over exactly the keys it may see, fp32."""
    query_len, num_heads, _ = q.shape
    group = num_heads // kv.shape[2]
    k, v = kv.float().repeat_interleave(group, dim=2)
    out = torch.empty(q.shape)
    for i in range(query_len):
        visible = kv.shape[1] - query_len + i + 1
        for h in range(num_heads):
            weights = (k[:visible, h] @ q[i, h].float() * HEAD_DIM**-0.5).softmax(0)
            out[i, h] = weights @ v[:visible, h]
    return out


def check(case: Case, layer: int = 1) -> None:
    dtype = case.q.dtype
    plan = plan_attention(case.kv_pages, case.page_table, case.context_lens, case.cu_query_lens)
    from_cpu = paged_attention(case.q, case.kv_pages, layer, plan)
    from_reference = paged_attention_reference(
        case.q, case.kv_pages, layer, case.page_table, case.context_lens, case.cu_query_lens
    )
    for got in (from_cpu, from_reference):
        torch.testing.assert_close(got.float(), case.want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (4, 1), (9, 3)])
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(1, 4), (1, 5), (1, 8), (1, 30)], id="decodes"),
        pytest.param([(7, 7)], id="prefill"),
        pytest.param([(5, 13), (3, 4)], id="prefill behind a cached prefix"),
        pytest.param([(1, 9), (6, 6), (1, 1), (2, 17), (1, 33), (1, 2)], id="mixed"),
    ],
)
def test_equals_dense_attention(
    lens: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dtype: torch.dtype
) -> None:
    check(make_case(lens, num_heads, num_kv_heads, dtype=dtype))


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_page_size_and_layer(page_tokens: int, layer: int) -> None:
    lens = [(1, 9), (6, 22), (1, 16), (1, 15)]
    check(make_case(lens, page_tokens=page_tokens, layer=layer), layer)


def test_sequences_may_share_pages() -> None:
    """A cached prefix is read by several sequences."""
    case = make_case([(1, 8), (1, 8)])
    case.page_table[1] = case.page_table[0]
    case.q[1] = case.q[0]
    case.want[1] = case.want[0]
    check(case)


def test_a_long_context_does_not_pad_short_ones() -> None:
    case = make_case([(1, 3), (1, 100), (1, 2), (1, 90)])
    plan = plan_attention(case.kv_pages, case.page_table, case.context_lens, case.cu_query_lens)
    assert sorted(group.mask.numel() for group in plan.decodes) == [2 * 4, 2 * 100]
