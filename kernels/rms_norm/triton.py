"""RMSNorm (Zhang & Sennrich, 2019, arXiv:1910.07467) on the GPU, alone or with the residual add before it.

Rounds wherever the unfused operations round: only the order of the sum of squares differs from the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract of kernels.rms_norm.reference: x [T, H] contiguous, weight [H]; a new tensor, or `out`.

    pdl: as of rotary_kv_write.
    """
    return _launch(x, weight, eps, None, None, None, out, pdl)


def add_rms_norm(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """residual[t] += x[t] + delta[t], in place; returns rms_norm(residual), a new tensor, or `out`.

    residual, x and delta [T, H] contiguous; each of the two sums is rounded to the dtype, x + delta first.
    slots [T] int32: the adapter slot of each row; delta is not read where it is -1. Both or neither.
    pdl: as of rotary_kv_write.
    """
    return _launch(residual, weight, eps, x, delta, slots, out, pdl)


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor | None,
    delta: torch.Tensor | None,
    slots: torch.Tensor | None,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    assert (delta is None) == (slots is None)
    out = torch.empty_like(rows) if out is None else out
    for tensor in (rows, x, delta, out):
        assert tensor is None or (tensor.shape == rows.shape and tensor.is_contiguous())
    num_rows, width = rows.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        rows,
        x,
        delta,
        slots,
        weight,
        out,
        width,
        eps,
        ADD=x is not None,
        HAS_DELTA=delta is not None,
        PDL=pdl,
        launch_pdl=pdl,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),  # 8 elements a thread: one load of 16 bytes in bf16
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rms_norm_kernel(
    rows_ptr: tl.tensor,
    x_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program. With ADD, rows is the residual and becomes residual + (x + delta)."""
    dtype = rows_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row.to(tl.int64) * width + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(rows_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_DELTA:
            delta_width = tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
            delta = tl.load(delta_ptr + at, mask=columns < delta_width, other=0.0).to(tl.float32)
            added = (added + delta).to(dtype).to(tl.float32)
        values = (values + added).to(dtype).to(tl.float32)
        tl.store(rows_ptr + at, values.to(dtype), mask=inside)
    tl.store(out_ptr + at, norm_row(values, weight, width, eps, dtype), mask=inside)


@triton.jit
def norm_row(
    values: tl.tensor, weight: tl.tensor, width: tl.tensor, eps: tl.tensor, DTYPE: tl.constexpr
) -> tl.tensor:
    """Of one row, in float32 with zeros past `width`, -> in DTYPE, rounded after each step."""
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = (values * inverse_rms).to(DTYPE).to(tl.float32)
    return (weight * normed).to(DTYPE)
