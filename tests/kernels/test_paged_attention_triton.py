"""The GPU's attention against the reference, over permuted page tables in a poisoned pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from kernels.paged_attention.reference import paged_attention as paged_attention_reference
from kernels.paged_attention.triton import (
    DECODE_KEYS,
    AttentionPlan,
    AttentionWorkspace,
    paged_attention,
    plan_attention,
)
from tests.kernels.triton_cases import DEVICE, DTYPES, poisoned, randn

LAYER, NUM_LAYERS = 1, 2
# probabilities are rounded to the dtype before they meet the values
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Case(NamedTuple):
    q: torch.Tensor
    kv_pages: torch.Tensor
    page_table: torch.Tensor
    context_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    workspace: AttentionWorkspace

    def plan(self) -> AttentionPlan:
        return plan_attention(self.workspace, self.context_lens, self.cu_query_lens, len(self.q))

    def run(self) -> torch.Tensor:
        out = poisoned(*self.q.shape, dtype=self.q.dtype)
        return paged_attention(self.q, self.kv_pages, LAYER, self.page_table, self.plan(), out)

    def want(self) -> torch.Tensor:
        return paged_attention_reference(
            self.q.float(),
            self.kv_pages.float(),
            LAYER,
            self.page_table,
            self.context_lens,
            self.cu_query_lens,
        )


def make_case(
    lens: Sequence[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    num_programs: int | None = 16,
) -> Case:
    """`lens`: (query_len, context_len) of each sequence. All that is no key or value of LAYER is NaN."""
    torch.manual_seed(len(lens))
    pages_of = [-(-context // page_tokens) for _, context in lens]
    num_pages = sum(pages_of) + 3
    kv_pages = poisoned(num_pages, NUM_LAYERS, 2, page_tokens, num_kv_heads, head_dim, dtype=dtype)
    free = torch.randperm(num_pages).tolist()
    # past the pages of a sequence lies a page number that does not exist
    page_table = torch.full((len(lens), max(pages_of) + 2), 1 << 20, dtype=index_dtype)
    for s, (_, context_len) in enumerate(lens):
        pages = torch.tensor([free.pop() for _ in range(pages_of[s])], dtype=torch.int64)
        page_table[s, : len(pages)] = pages
        kv = poisoned(len(pages) * page_tokens, 2, num_kv_heads, head_dim, dtype=dtype)
        kv[:context_len] = randn(context_len, 2, num_kv_heads, head_dim, dtype=dtype)
        kv_pages[pages.to(DEVICE), LAYER] = kv.view(-1, page_tokens, *kv.shape[1:]).transpose(1, 2)
    num_tokens = sum(query_len for query_len, _ in lens)
    workspace = AttentionWorkspace.allocate(
        len(lens), num_tokens, num_heads, num_kv_heads, head_dim, DEVICE, num_programs
    )
    workspace.partial_out.fill_(torch.nan)
    workspace.partial_stats.fill_(torch.nan)
    return Case(
        randn(num_tokens, num_heads, head_dim, dtype=dtype),
        kv_pages,
        page_table.to(DEVICE),
        torch.tensor([context for _, context in lens], dtype=index_dtype, device=DEVICE),
        torch.tensor([0, *(n for n, _ in lens)], device=DEVICE).cumsum(0).to(index_dtype),
        workspace,
    )


def check(case: Case) -> None:
    out, want = case.run(), case.want()
    assert out.isfinite().all()
    assert float((out - want).norm() / want.norm()) < TOLERANCE[case.q.dtype]
    assert not case.workspace.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 64), (9, 3, 24)])
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1)], id="first token"),
        pytest.param([(1, 4), (1, 16), (1, 65), (1, 130)], id="decodes"),
        pytest.param([(7, 7)], id="prefill"),
        pytest.param([(70, 130), (3, 200)], id="prefill behind a cached prefix"),
        pytest.param([(1, 9), (66, 66), (1, 1), (2, 17), (1, 133), (1, 2)], id="mixed"),
    ],
)
def test_equals_the_reference(
    lens: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    check(make_case(lens, num_heads, num_kv_heads, head_dim, dtype=dtype))


@pytest.mark.parametrize("page_tokens", [4, 32, 128])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_page_sizes(page_tokens: int, index_dtype: torch.dtype) -> None:
    check(make_case([(1, 100), (5, 37)], page_tokens=page_tokens, index_dtype=index_dtype))


@pytest.mark.parametrize("num_programs", [1, 6, 400])
def test_a_long_context_is_cut_and_merged(num_programs: int) -> None:
    """One sequence in up to 20 splits, more than are merged at a time, beside short ones."""
    check(make_case([(1, 20 * DECODE_KEYS - 3), (1, 5), (1, 64)], num_programs=num_programs))


def test_padding_rows_give_zeros() -> None:
    case = make_case([(1, 20), (1, 0), (1, 70), (1, 0)])
    check(case)
    assert not case.run()[[1, 3]].any()


def test_sequences_without_a_query_are_nothing() -> None:
    check(make_case([(5, 20), (1, 70), (0, 0), (0, 0)]))


def test_the_plan_covers_every_key_and_query_once() -> None:
    lens = [(1, 700), (130, 200), (1, 0), (1, 64), (2, 2), (33, 90), (1, 65)]
    case = make_case(lens, num_programs=12)
    plan, workspace = case.plan(), case.workspace
    rows = case.cu_query_lens.tolist()

    units = [unit for unit in workspace.units[: plan.num_units].tolist() if unit[0] >= 0]
    by_seq = {s: [unit for unit in units if unit[0] == s] for s in range(len(lens))}
    assert units == [unit for s in by_seq for unit in by_seq[s]]
    for s, (query, context) in enumerate(lens):
        starts = [start for _, _, start, *_ in by_seq[s]]
        ends = [end for _, _, _, end, *_ in by_seq[s]]
        assert (starts, ends) == ([], []) or (starts, ends) == ([0, *ends[:-1]], [*starts[1:], context])
        assert all(end - start == ends[0] for start, end in zip(starts[:-1], ends[:-1], strict=True))
        assert [unit[4:] for unit in by_seq[s]] == [[i, len(starts)] for i in range(len(starts))]
        assert {unit[1] for unit in by_seq[s]} == ({rows[s]} if query == 1 else set())

    tiles = [tuple(tile) for tile in workspace.tiles[: plan.num_tiles].tolist() if tile[0] >= 0]
    assert sorted(tiles) == [
        (s, rows[s], first, query, context)
        for s, (query, context) in enumerate(lens)
        if query > 1
        for first in range(0, query, 64)
    ]


def test_the_same_workspace_serves_step_after_step() -> None:
    """Longer and shorter contexts, and the same bits for the same step."""
    case = make_case([(1, 300), (1, 200)], num_programs=20)
    first = case.run()
    longer = case.context_lens.clone()
    case.context_lens.copy_(torch.tensor([10, 100]))
    check(case)
    case.context_lens.copy_(longer)
    assert torch.equal(case.run(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 131072)], id="one long decode"),
        pytest.param([(1, 1 + 9 * i) for i in range(256)], id="256 decodes"),
        pytest.param([(1, 40000)] + [(1, 100 + i) for i in range(31)], id="one long among short"),
        pytest.param([(2048, 2048)], id="prefill"),
        pytest.param([(1000, 9000), (1, 5000), (37, 1037), (1, 0), (511, 511)], id="mixed"),
    ],
)
def test_real_sizes(lens: list[tuple[int, int]], head_dim: int) -> None:
    case = make_case(lens, 32, 8, head_dim, dtype=torch.bfloat16, num_programs=None)
    check(case)
    first = case.run()
    for _ in range(5):
        assert torch.equal(case.run(), first)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths() -> None:
    """Captured with short contexts; replayed with long ones it gives the bits of an eager run."""
    case = make_case([(1, 900 + 100 * i) for i in range(16)], 32, 8, 128, dtype=torch.bfloat16)
    full_lens = case.context_lens.clone()
    want = case.run()
    case.context_lens.fill_(3)
    out = poisoned(*case.q.shape, dtype=case.q.dtype)
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(case.q, case.kv_pages, LAYER, case.page_table, case.plan(), out)
    case.context_lens.copy_(full_lens)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
