"""Pinned host memory read by a kernel.

Copies to a GPU are done by an engine in the order of their issue, whatever their stream: a step's inputs
would wait for all adapters that are on their way. A kernel's loads wait for none of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # words


def read_host(source: torch.Tensor, out: torch.Tensor) -> None:
    """The contract of kernels.host_read.reference; `source` is pinned, and not written until this has run."""
    words, out_words = (tensor.view(-1).view(torch.int32) for tensor in (source, out))
    assert len(words) == len(out_words)
    if len(words):
        _read_kernel[(triton.cdiv(len(words), BLOCK),)](
            words, out_words, len(words), BLOCK=BLOCK, num_warps=8
        )


@triton.jit(do_not_specialize=["num_words"])
def _read_kernel(
    source_ptr: tl.tensor, out_ptr: tl.tensor, num_words: tl.tensor, BLOCK: tl.constexpr
) -> None:
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    # volatile: the same addresses held other values in the step before
    tl.store(out_ptr + word, tl.load(source_ptr + word, mask=inside, volatile=True), mask=inside)
