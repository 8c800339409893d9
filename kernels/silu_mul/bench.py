"""Gated activation of Llama-3-8B rows, with and without a LoRA delta: python -m kernels.silu_mul.bench"""

from __future__ import annotations

from functools import partial

import torch

from kernels.silu_mul.reference import silu_mul as silu_mul_reference
from kernels.silu_mul.triton import silu_mul
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

WIDTH = 14336


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 64, 256, 2048, 8192):
        for with_delta in (False, True):
            measure(num_rows, with_delta)
    return 0


def measure(num_rows: int, with_delta: bool) -> None:
    nbytes = num_rows * WIDTH * 2
    tensors = 5 if with_delta else 3
    copies = num_copies(tensors * nbytes)
    slots = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    buffers = [
        (_randn(num_rows, 2 * WIDTH), _randn(num_rows, 2 * WIDTH), _randn(num_rows, WIDTH))
        for _ in range(copies)
    ]
    calls = [
        partial(silu_mul, gate_up, delta, slots, out) if with_delta else partial(silu_mul, gate_up, out=out)
        for gate_up, delta, out in buffers
    ]
    calls[0]()
    gate_up, delta, out = buffers[0]
    want = silu_mul_reference(gate_up + delta if with_delta else gate_up)
    torch.testing.assert_close(out, want, rtol=2**-6, atol=1e-6)
    name = f"silu_mul {num_rows} x {WIDTH}" + (" + delta" if with_delta else "")
    report(name, graph_us(calls), tensors * nbytes / READ_BYTES_PER_US)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
