"""Embedding lookup of Llama-3-8B rows, half of the tokens on the device: python -m kernels.embedding.bench"""

from __future__ import annotations

from functools import partial

import torch

from kernels.embedding.reference import embed as embed_reference
from kernels.embedding.triton import embed
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

VOCAB, WIDTH = 128256, 4096


def main() -> int:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.bfloat16, device="cuda")
    for num_rows in (1, 64, 256, 8192):
        nbytes = 2 * num_rows * WIDTH * weight.itemsize
        sampled = torch.randint(VOCAB, (num_rows,), device="cuda")
        batches = [torch.randint(VOCAB, (num_rows,), device="cuda") for _ in range(num_copies(nbytes))]
        for token_ids in batches:
            token_ids[::2] = -1 - torch.arange(0, num_rows, 2, device="cuda")
        torch.testing.assert_close(
            embed(batches[0], sampled, weight), embed_reference(batches[0], sampled, weight), rtol=0, atol=0
        )
        calls = [partial(embed, token_ids, sampled, weight) for token_ids in batches]
        report(f"embed {num_rows} x {WIDTH}", graph_us(calls), nbytes / READ_BYTES_PER_US)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
