"""Embedding lookup on the GPU: a program for each block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


def embed(token_ids: torch.Tensor, sampled: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The contract of kernels.embedding.reference; all contiguous."""
    for tensor in (token_ids, sampled, weight):
        assert tensor.is_contiguous()
    num_rows, width = len(token_ids), weight.shape[1]
    out = weight.new_empty(num_rows, width)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _embed_kernel[grid](token_ids, sampled, weight, out, width, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def _embed_kernel(
    token_ids_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(token_ids_ptr + row)
    if token < 0:
        token = tl.load(sampled_ptr - 1 - token)
    values = tl.load(weight_ptr + token * width + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + columns, values, mask=inside)
