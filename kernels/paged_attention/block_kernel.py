"""One block of keys and values: what the loops of decode and prefill share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_offsets(
    pages: tl.tensor,
    key: tl.tensor,
    is_key: tl.tensor,
    head_offset: tl.tensor,
    stride_page: tl.tensor,
    stride_token: tl.tensor,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Of keys [K], positions in a sequence whose page numbers begin at `pages`: offsets [K, D], int64."""
    page = tl.load(pages + key // PAGE_TOKENS, mask=is_key, other=0).to(tl.int64)
    offset = page * stride_page + (key % PAGE_TOKENS) * stride_token + head_offset
    return offset[:, None] + tl.arange(0, BLOCK_DIM)[None, :]


@triton.jit
def accumulate(
    scores: tl.tensor, scale: tl.tensor, v: tl.tensor, best: tl.tensor, weight: tl.tensor, acc: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One step of the online softmax. A row that has seen no key yet must see one now."""
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
    probs = tl.exp2(scores * scale - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_best, weight * shrink + tl.sum(probs, axis=1), acc
