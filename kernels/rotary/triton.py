"""Rotary embedding (Su et al., 2021, arXiv:2104.09864) with the KV write on the GPU, LoRA delta included."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_ROWS = 256
"""Up to here small blocks spread a step over the GPU; above, large ones save programs."""


def rotary_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    kv_slots: torch.Tensor,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The contract of kernels.rotary.reference, of qkv + delta (both contiguous, rounded to the dtype).

    kv_slots [T] int64: of a row with -1 no key or value is written, and its query means nothing.
    slots [T] int32: the adapter slot of each row; delta is not read where it is -1. Both or neither.
    cos, sin [T, D] contiguous. Returns rot(q) [T, H, D], a new tensor, or `out`.
    pdl: programmatic dependent launch. The kernel may start while the launch before it on the same stream
    runs, and waits for it before it touches anything that changes within a step.
    """
    assert (delta is None) == (slots is None)
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert delta is None or (delta.shape == qkv.shape and delta.is_contiguous())
    assert kv_pages.stride(-1) == 1
    num_tokens = len(qkv)
    page_tokens, num_kv_heads, head_dim = kv_pages.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    out = qkv.new_empty(num_tokens, num_heads, head_dim) if out is None else out
    assert out.shape == (num_tokens, num_heads, head_dim)
    assert out.is_contiguous()
    if num_tokens == 0:
        return out
    kv = kv_pages[:, layer]  # [N, 2, page_tokens, KH, D]
    block_heads = 8 if num_tokens <= FEW_ROWS else 16
    _rotary_kv_write_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_heads))](
        qkv,
        delta,
        slots,
        cos,
        sin,
        out,
        kv,
        kv_slots,
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        kv.stride(3),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_TOKENS=page_tokens,
        HAS_DELTA=delta is not None,
        PDL=pdl,
        launch_pdl=pdl,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2 if block_heads == 8 else 4,
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "kv_slots_ptr"])
def _rotary_kv_write_kernel(
    qkv_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    kv_ptr: tl.tensor,
    kv_slots_ptr: tl.tensor,
    stride_page: tl.tensor,
    stride_kv: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One token and some of its H query, KH key and KH value heads, which lie side by side in qkv."""
    dtype = qkv_ptr.dtype.element_ty
    num_all: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    dim: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < num_all) & (half < HALF)

    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = token * (num_all * dim) + head * dim + half
    low = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        read = inside & (head < tl.where(tl.load(slots_ptr + token) >= 0, num_all, 0))
        low += tl.load(delta_ptr + at, mask=read, other=0.0).to(tl.float32)
        high += tl.load(delta_ptr + at + HALF, mask=read, other=0.0).to(tl.float32)
        low = low.to(dtype).to(tl.float32)
        high = high.to(dtype).to(tl.float32)

    angle = token * dim + half
    in_row = half < HALF
    cos_low = tl.load(cos_ptr + angle, mask=in_row, other=0.0)
    cos_high = tl.load(cos_ptr + angle + HALF, mask=in_row, other=0.0)
    sin_low = tl.load(sin_ptr + angle, mask=in_row, other=0.0)
    sin_high = tl.load(sin_ptr + angle + HALF, mask=in_row, other=0.0)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    new_low = tl.where(is_value, low, low * cos_low - high * sin_low).to(dtype)
    new_high = tl.where(is_value, high, high * cos_high + low * sin_high).to(dtype)

    is_query = inside & (head < NUM_HEADS)
    to_query = out_ptr + token * (NUM_HEADS * dim) + head * dim + half
    tl.store(to_query, new_low, mask=is_query)
    tl.store(to_query + HALF, new_high, mask=is_query)

    slot = tl.load(kv_slots_ptr + token).to(tl.int64)
    written = inside & (head >= NUM_HEADS) & (head < tl.where(slot >= 0, num_all, 0))
    kv_head = head - NUM_HEADS - is_value * NUM_KV_HEADS
    to_page = kv_ptr + slot // PAGE_TOKENS * stride_page + slot % PAGE_TOKENS * stride_token
    to_page += is_value * stride_kv + kv_head * stride_head + half
    tl.store(to_page, new_low, mask=written)
    tl.store(to_page + HALF, new_high, mask=written)
