"""Launches that start before the one before has ended (pdl) give the bits of launches that do not."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.rotary_attention import rotary_attention
from kernels.paged_attention.triton import AttentionWorkspace, plan_attention
from kernels.rms_norm.triton import add_rms_norm
from kernels.silu_mul.triton import silu_mul
from tests.kernels.triton_cases import DEVICE, randn

NUM_LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INTER = 6, 8, 2, 128, 1024, 2048
CONTEXT, PAGE_TOKENS = 700, 16


class Decoder:
    """Decode steps of `num_rows` sequences through layers whose buffers are all shared."""

    def __init__(self, num_rows: int) -> None:
        torch.manual_seed(num_rows)
        dtype = torch.bfloat16
        pages_each = CONTEXT // PAGE_TOKENS + 1
        shape = (num_rows * pages_each, NUM_LAYERS, 2, PAGE_TOKENS, KV_HEADS, DIM)
        self.kv_pages = randn(*shape, dtype=dtype)
        self.page_table = torch.randperm(shape[0], dtype=torch.int32).view(num_rows, -1).to(DEVICE)
        self.context_lens = torch.full((num_rows,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.cu_query_lens = torch.arange(num_rows + 1, dtype=torch.int32, device=DEVICE)
        last = CONTEXT - 1
        self.kv_slots = self.page_table[:, last // PAGE_TOKENS].long() * PAGE_TOKENS + last % PAGE_TOKENS
        self.workspace = AttentionWorkspace.allocate(num_rows, num_rows, HEADS, KV_HEADS, DIM, DEVICE)
        self.cos, self.sin = randn(num_rows, DIM), randn(num_rows, DIM)
        widths = [(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM), (HEADS * DIM, HIDDEN), (HIDDEN, 2 * INTER)]
        self.weights = [randn(*width, dtype=dtype, scale=0.03) for width in [*widths, (INTER, HIDDEN)]]
        self.norm = randn(HIDDEN, dtype=dtype)
        self.residual = randn(num_rows, HIDDEN, dtype=dtype)

    def step(self, pdl: bool) -> torch.Tensor:
        qkv, o, gate_up, down = self.weights
        residual = self.residual.clone()
        plan = plan_attention(self.workspace, self.context_lens, self.cu_query_lens, len(residual))
        x = residual
        for layer in range(NUM_LAYERS):
            x = add_rms_norm(residual, x, self.norm, 1e-5, pdl=pdl)
            x = rotary_attention(
                x @ qkv,
                self.cos,
                self.sin,
                self.kv_pages,
                layer,
                self.kv_slots,
                self.page_table,
                plan,
                pdl=pdl,
            )
            x = add_rms_norm(residual, x.flatten(1) @ o, self.norm, 1e-5, pdl=pdl)
            x = silu_mul(x @ gate_up, pdl=pdl) @ down
        return residual + x


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 24])
def test_gives_the_same_bits(num_rows: int) -> None:
    decoder = Decoder(num_rows)
    want = decoder.step(pdl=False)
    assert want.isfinite().all()
    assert torch.equal(decoder.step(pdl=True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder.step(pdl=True)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
