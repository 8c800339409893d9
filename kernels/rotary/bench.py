"""Rotation and KV write of Llama-3-8B rows, with and without a LoRA delta: python -m kernels.rotary.bench"""

from __future__ import annotations

from functools import partial

import torch

from kernels.rotary.reference import rotary_kv_write as rotary_kv_write_reference
from kernels.rotary.triton import rotary_kv_write
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

HEADS, KV_HEADS, DIM, PAGE_TOKENS = 32, 8, 128, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 64, 256, 2048, 8192):
        for with_delta in (False, True):
            measure(num_rows, with_delta)
    return 0


def measure(num_rows: int, with_delta: bool) -> None:
    nbytes = num_rows * WIDTH * 2
    tensors = 3 if with_delta else 2
    num_layers = copies = min(num_copies(tensors * nbytes), 64)
    num_pages = 2 * num_rows // PAGE_TOKENS + 2
    shape = (num_pages, num_layers, 2, PAGE_TOKENS, KV_HEADS, DIM)
    kv_pages = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    kv_slots = torch.randperm(num_pages * PAGE_TOKENS, device="cuda")[:num_rows]
    angles = torch.randn(num_rows, DIM // 2, device="cuda").repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    lora = [_randn(num_rows, WIDTH) for _ in range(copies if with_delta else 0)]
    qkv = [_randn(num_rows, WIDTH) for _ in range(copies)]
    outs = [_randn(num_rows, HEADS * DIM).view(num_rows, HEADS, DIM) for _ in range(copies)]
    calls = [
        partial(
            rotary_kv_write,
            qkv[i],
            cos,
            sin,
            kv_pages,
            i,
            kv_slots,
            lora[i] if with_delta else None,
            slots if with_delta else None,
            outs[i],
        )
        for i in range(copies)
    ]
    calls[0]()
    want_pages = torch.zeros_like(kv_pages[:, :1])
    whole = qkv[0] + lora[0] if with_delta else qkv[0]
    want = rotary_kv_write_reference(whole, cos, sin, want_pages, 0, kv_slots)
    torch.testing.assert_close(outs[0], want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(kv_pages[:, :1], want_pages, rtol=2**-7, atol=2**-7)
    name = f"rotary_kv_write {num_rows} rows" + (" + delta" if with_delta else "")
    floor_bytes = tensors * nbytes + cos.nbytes + sin.nbytes
    report(name, graph_us(calls), floor_bytes / READ_BYTES_PER_US)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
