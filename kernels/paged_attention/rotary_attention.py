"""Rotary embedding, KV write and attention of a step on the GPU, in one launch where that is quicker.

That is in steps of decodes, for heads of 128 dimensions, on GPUs with a tensor memory accelerator: it brings
what is older than the step into shared memory, page by page, while the product of queries, keys and values
still runs. On an H200 a draft of it took, alone and for 64 contexts of 144 tokens, 15.6 us instead of 17.2
with Llama-3-8B's heads, 9.8 instead of 13.6 with half of them; for 8 contexts and half the heads 4.3 instead
of 7.3. (What runs now: kernels.paged_attention.bench.)

Tried there: the same in Triton without Gluon, whose loads ahead can only go to registers (with 64 sequences
steps were no shorter than with two launches); two blocks in shared memory, not one (half of the heads 20 %
quicker at 144 tokens, 15 % slower at 1,000); one warp, or two, a program (up to 12 % quicker for many short
contexts, 30 % slower for long ones).
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch
import triton

from kernels.gpu import is_at_least_hopper
from kernels.paged_attention.triton import LOG2_E, AttentionPlan, paged_attention
from kernels.rotary.triton import rotary_kv_write

HEAD_DIM = 128
BLOCK_KEYS = 64  # that a program has in shared memory at once
WARPS = 4

_logger = logging.getLogger(__name__)


def rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_pages: torch.Tensor,
    layer: int,
    kv_slots: torch.Tensor,
    page_table: torch.Tensor,
    plan: AttentionPlan,
    delta: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """rotary_kv_write and then paged_attention [T, H, D], new; arguments as of those.

    With `pdl` nothing but qkv and delta may come from the launch before; in a step of decodes alone nothing
    but those, cos, sin and kv_slots from this step.
    """
    if plan.num_tiles or not has_one_launch(qkv, kv_pages):
        q = rotary_kv_write(qkv, cos, sin, kv_pages, layer, kv_slots, delta, slots, pdl=pdl)
        return paged_attention(q, kv_pages, layer, page_table, plan, pdl=pdl)
    assert (delta is None) == (slots is None)
    for tensor in (qkv, cos, sin):
        assert tensor.is_contiguous()
    assert delta is None or (delta.shape == qkv.shape and delta.is_contiguous())
    assert page_table.stride(1) == 1
    workspace = plan.workspace
    num_kv_heads = workspace.num_kv_heads
    num_heads = workspace.partial_out.shape[1]
    page_tokens = kv_pages.shape[3]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * HEAD_DIM
    assert kv_pages.shape[4] == num_kv_heads
    assert workspace.partial_out.shape[2] == HEAD_DIM
    out = qkv.new_empty(len(qkv), num_heads, HEAD_DIM)
    width = num_kv_heads * HEAD_DIM
    rows_of_page = kv_pages.stride(0) // width
    num_rows = (len(kv_pages) - 1) * rows_of_page + kv_pages[0].numel() // width
    kv_rows = kv_pages.as_strided((num_rows, width), (width, 1))
    kernel = _kernel()
    assert kernel is not None
    kernel.rotary_decode_kernel[(num_kv_heads, plan.num_units)](
        kernel.page_descriptor(kv_rows, page_tokens),
        qkv,
        delta,
        slots,
        cos,
        sin,
        kv_slots,
        kv_rows,
        out,
        page_table,
        workspace.units,
        workspace.partial_out,
        workspace.partial_stats[0],
        workspace.partial_stats[1],
        workspace.arrivals,
        HEAD_DIM**-0.5 * LOG2_E,
        page_table.stride(0),
        layer * 2 * page_tokens,
        ROWS_OF_PAGE=rows_of_page,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PAGE_TOKENS=page_tokens,
        N=max(8, triton.next_power_of_2(num_heads // num_kv_heads)),
        WARPS=WARPS,
        HAS_DELTA=delta is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=WARPS,
    )
    return out


def has_one_launch(qkv: torch.Tensor, kv_pages: torch.Tensor) -> bool:
    page_tokens, num_kv_heads, head_dim = kv_pages.shape[3:]
    width = num_kv_heads * head_dim
    return (
        qkv.device.type != "cpu"  # the interpreter has no Gluon
        and is_at_least_hopper(qkv.device)
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and head_dim == HEAD_DIM
        # boxes of pages lie in a block as the block's own rows do
        and page_tokens % 8 == 0
        and BLOCK_KEYS % page_tokens == 0
        and kv_pages.stride()[1:] == (2 * page_tokens * width, page_tokens * width, width, head_dim, 1)
        and kv_pages.stride(0) % width == 0
        and kv_pages.data_ptr() % 16 == 0
        and _kernel() is not None
    )


@cache
def _kernel() -> ModuleType | None:
    try:
        from kernels.paged_attention import rotary_decode_kernel
    except (ImportError, AttributeError) as error:
        _logger.warning("decodes take a launch more: this Triton's Gluon lacks something (%s)", error)
        return None
    return rotary_decode_kernel
