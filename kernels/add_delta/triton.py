"""Row-wise add of LoRA deltas on the GPU: a program for each block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def add_delta(y: torch.Tensor, delta: torch.Tensor, slots: torch.Tensor) -> None:
    """The contract of kernels.add_delta.reference; all contiguous."""
    assert y.shape == delta.shape
    for tensor in (y, delta, slots):
        assert tensor.is_contiguous()
    num_rows, width = y.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        _add_delta_kernel[grid](y, delta, slots, width, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _add_delta_kernel(
    y_ptr: tl.tensor, delta_ptr: tl.tensor, slots_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if tl.load(slots_ptr + row) < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
