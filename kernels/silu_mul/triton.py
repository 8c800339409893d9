"""SwiGLU's activation (Shazeer, 2020, arXiv:2002.05202) on the GPU, with the LoRA delta of its input."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_ROWS = 256
"""Up to here small blocks spread a step over the GPU; above, large ones save programs."""


def silu_mul(
    gate_up: torch.Tensor,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract of kernels.silu_mul.reference, of gate_up + delta [T, 2 I]: contiguous, the sum rounded.

    slots [T] int32: the adapter slot of each row; delta is not read where it is -1. Both or neither.
    pdl: as of rotary_kv_write. Returns [T, I], a new tensor, or `out`.
    """
    assert (delta is None) == (slots is None)
    assert gate_up.is_contiguous()
    assert delta is None or (delta.shape == gate_up.shape and delta.is_contiguous())
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width) if out is None else out
    assert out.shape == (num_rows, width)
    assert out.is_contiguous()
    if num_rows == 0:
        return out
    block = 1024 if num_rows <= FEW_ROWS else 2048
    _silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up,
        delta,
        slots,
        out,
        width,
        HAS_DELTA=delta is not None,
        PDL=pdl,
        launch_pdl=pdl,
        BLOCK=block,
        num_warps=block // 256,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row.to(tl.int64) * (2 * width) + columns
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        read = columns < tl.where(tl.load(slots_ptr + row) >= 0, width, 0)
        gate += tl.load(delta_ptr + at, mask=read, other=0.0).to(tl.float32)
        up += tl.load(delta_ptr + at + width, mask=read, other=0.0).to(tl.float32)
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * width + columns, silu_times(gate, up, dtype), mask=inside)


@triton.jit
def silu_times(gate: tl.tensor, up: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """silu(gate) * up in DTYPE, rounded after each step."""
    gate = gate.to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(DTYPE)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(DTYPE)
