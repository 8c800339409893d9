"""Attention with Llama-3-8B's heads over pages of 16 tokens: python -m kernels.paged_attention.bench

decode: one query a sequence, all of one length; floor: keys, values, queries and output once.
with its rotary embedding: from the projection on, beside the two launches that it takes otherwise; floor: as
above, and what is read for it.
prefill: beside PyTorch's flash attention over contiguous tensors, where there is no cached prefix; floor:
the products that the causal mask leaves. The plan, made once a step, is timed by itself.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.paged_attention.reference import paged_attention as paged_attention_reference
from kernels.paged_attention.rotary_attention import has_one_launch, rotary_attention
from kernels.paged_attention.triton import AttentionPlan, AttentionWorkspace, paged_attention, plan_attention
from kernels.rotary.triton import rotary_kv_write
from kernels.timing import FLOPS_PER_US, READ_BYTES_PER_US, graph_us, num_copies, report

HEADS, KV_HEADS, DIM, PAGE_TOKENS = 32, 8, 128, 16
MAX_ERROR = 6e-3  # relative, Frobenius


class Step:
    """Sequences (query_len, context_len) over shuffled pages of several layers, so that the L2 is cold."""

    def __init__(self, lens: list[tuple[int, int]]) -> None:
        self.lens = lens
        pages_of = [-(-context // PAGE_TOKENS) for _, context in lens]
        self.kv_bytes = sum(context for _, context in lens) * 2 * KV_HEADS * DIM * 2
        num_layers = num_copies(self.kv_bytes, least=2)
        shape = (sum(pages_of), num_layers, 2, PAGE_TOKENS, KV_HEADS, DIM)
        self.kv_pages = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        pages = torch.randperm(sum(pages_of), device="cuda", dtype=torch.int32)
        self.page_table = torch.zeros(len(lens), max(pages_of), dtype=torch.int32, device="cuda")
        first = 0
        for row, num_pages in zip(self.page_table, pages_of, strict=True):
            row[:num_pages] = pages[first : first + num_pages]
            first += num_pages
        self.context_lens = torch.tensor([c for _, c in lens], dtype=torch.int32, device="cuda")
        query_lens = torch.tensor([0, *(q for q, _ in lens)], dtype=torch.int32, device="cuda")
        self.cu_query_lens = query_lens.cumsum(0, dtype=torch.int32)
        num_tokens = sum(q for q, _ in lens)
        self.q = torch.randn(num_tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.workspace = AttentionWorkspace.allocate(len(lens), num_tokens, HEADS, KV_HEADS, DIM, "cuda")
        self.plan = self.make_plan()
        self.calls = [partial(self.attend, layer) for layer in range(num_layers)]

    def make_plan(self) -> AttentionPlan:
        return plan_attention(self.workspace, self.context_lens, self.cu_query_lens, len(self.q))

    def attend(self, layer: int) -> None:
        paged_attention(self.q, self.kv_pages, layer, self.page_table, self.plan, self.out)

    def check(self) -> None:
        """The first, middle and last sequence."""
        self.out.fill_(torch.nan)
        self.attend(0)
        bounds = self.cu_query_lens.tolist()
        for s in {0, len(self.lens) // 2, len(self.lens) - 1}:
            want = paged_attention_reference(
                self.q[bounds[s] : bounds[s + 1]].float(),
                self.kv_pages[:, :1],
                0,
                self.page_table[s : s + 1],
                self.context_lens[s : s + 1],
                torch.tensor([0, bounds[s + 1] - bounds[s]]),
            )
            error = float((self.out[bounds[s] : bounds[s + 1]] - want).norm() / want.norm())
            assert error < MAX_ERROR, f"sequence {s} of {self.lens[:3]}...: error {error}"


def main() -> int:
    torch.manual_seed(0)
    for batch in (1, 64, 256):
        for context in (512, 2048, 8192):
            decode(f"decode {batch} x {context}", [(1, context)] * batch)
    decode("decode 1 x 131072", [(1, 131072)])
    decode("decode 63 x 512 and 1 x 32768", [(1, 512)] * 63 + [(1, 32768)])
    for batch in (1, 8, 64, 256):
        for context in (144, 1024, 4096):
            decode_with_rotary(batch, context)
    prefill("prefill 2048", [(2048, 2048)])
    prefill("prefill 8192", [(8192, 8192)])
    prefill("prefill 16 x 512", [(512, 512)] * 16)
    prefill("prefill 2048 behind 6144", [(2048, 8192)])
    return 0


def decode(name: str, lens: list[tuple[int, int]]) -> None:
    step = Step(lens)
    step.check()
    floor_us = (step.kv_bytes + 2 * step.q.nbytes) / READ_BYTES_PER_US
    report(name, graph_us(step.calls), floor_us, plan_us=round(graph_us([step.make_plan] * 16), 2))


def decode_with_rotary(batch: int, context: int) -> None:
    step = Step([(1, context)] * batch)
    assert has_one_launch(step.q, step.kv_pages)
    qkv = torch.randn(batch, (HEADS + 2 * KV_HEADS) * DIM, dtype=torch.bfloat16, device="cuda")
    angles = torch.randn(batch, DIM // 2, device="cuda").repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    last = context - 1
    kv_slots = step.page_table[:, last // PAGE_TOKENS].long() * PAGE_TOKENS + last % PAGE_TOKENS

    def one(layer: int) -> torch.Tensor:
        return rotary_attention(
            qkv, cos, sin, step.kv_pages, layer, kv_slots, step.page_table, step.plan, pdl=True
        )

    def two(layer: int) -> torch.Tensor:
        q = rotary_kv_write(qkv, cos, sin, step.kv_pages, layer, kv_slots, pdl=True)
        return paged_attention(q, step.kv_pages, layer, step.page_table, step.plan, pdl=True)

    want = two(0)
    error = float((one(0) - want).norm() / want.norm())
    assert error < MAX_ERROR, f"{batch} x {context}: error {error}"
    layers = range(step.kv_pages.shape[1])
    two_us = graph_us([partial(two, layer) for layer in layers])
    floor_us = (step.kv_bytes + qkv.nbytes + 2 * cos.nbytes + step.q.nbytes) / READ_BYTES_PER_US
    us = graph_us([partial(one, layer) for layer in layers])
    report(f"decode {batch} x {context} with rotary", us, floor_us, two_launches_us=round(two_us, 2))


def prefill(name: str, lens: list[tuple[int, int]]) -> None:
    step = Step(lens)
    step.check()
    # queries at positions context - query .. context - 1 see one key more each
    num_pairs = sum(query * context - query * (query - 1) // 2 for query, context in lens)
    floor_us = 4 * HEADS * DIM * num_pairs / FLOPS_PER_US
    theirs = {}
    if all(query == context for query, context in lens) and len(set(lens)) == 1:
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            theirs[f"torch_{backend.name.lower()}_us"] = round(_torch_us(len(lens), lens[0][0], backend), 2)
    report(name, graph_us(step.calls), floor_us, **theirs)


def _torch_us(batch: int, length: int, backend: SDPBackend) -> float:
    def randn(heads: int) -> torch.Tensor:
        x = torch.randn(batch, length, heads, DIM, dtype=torch.bfloat16, device="cuda")
        return x.transpose(1, 2)

    q, k, v = randn(HEADS), randn(KV_HEADS), randn(KV_HEADS)

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return graph_us([attend] * 4)


if __name__ == "__main__":
    raise SystemExit(main())
