"""RMSNorm of Llama-3-8B rows, plain and behind residual and LoRA adds: python -m kernels.rms_norm.bench"""

from __future__ import annotations

from functools import partial

import torch

from kernels.rms_norm.reference import rms_norm as rms_norm_reference
from kernels.rms_norm.triton import add_rms_norm
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

WIDTH, EPS = 4096, 1e-5


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 64, 256, 2048, 8192):
        for with_delta in (False, True):
            measure(num_rows, with_delta)
    return 0


def measure(num_rows: int, with_delta: bool) -> None:
    nbytes = num_rows * WIDTH * 2
    tensors = 5 if with_delta else 4  # residual read and written, x, delta, out
    copies = num_copies(tensors * nbytes)
    weight = _randn(WIDTH)
    slots = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
    buffers = [[_randn(num_rows, WIDTH) for _ in range(4)] for _ in range(copies)]
    residual, x, delta, out = buffers[0]
    want = residual + (x + delta if with_delta else x)
    calls = [
        partial(add_rms_norm, residual, x, weight, EPS, delta, slots, out)
        if with_delta
        else partial(add_rms_norm, residual, x, weight, EPS, out=out)
        for residual, x, delta, out in buffers
    ]
    calls[0]()
    assert torch.equal(residual, want)
    torch.testing.assert_close(out, rms_norm_reference(want, weight, EPS), rtol=2**-6, atol=1e-6)
    name = f"add_rms_norm {num_rows} x {WIDTH}" + (" + delta" if with_delta else "")
    report(name, graph_us(calls), tensors * nbytes / READ_BYTES_PER_US)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
