"""The linears of Llama-3-8B in decode, bf16, beside cuBLAS: python -m kernels.linear.bench

Floor: weights, x and y once. Each call has weights of its own, so that the L2 is cold.
"""

from __future__ import annotations

from functools import partial

import torch

from kernels.linear.triton import linear
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
MAX_ERROR = 5e-3  # relative, Frobenius


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 8, 16, 32, 64):
        for name, (out_features, in_features) in SHAPES.items():
            measure(name, num_rows, out_features, in_features)
    return 0


def measure(name: str, num_rows: int, out_features: int, in_features: int) -> None:
    x, out = _randn(num_rows, in_features), _randn(num_rows, out_features)
    nbytes = 2 * out_features * in_features
    weights = [_randn(out_features, in_features) for _ in range(num_copies(nbytes, least=2))]
    linear(x, weights[0], out.fill_(torch.nan))
    want = x.float() @ weights[0].float().T
    error = float((out - want).norm() / want.norm())
    assert error < MAX_ERROR, f"{name}, {num_rows} rows: error {error}"
    us = graph_us([partial(linear, x, weight, out) for weight in weights])
    cublas_us = graph_us([partial(torch.mm, x, weight.T, out=out) for weight in weights])
    floor_us = (nbytes + x.nbytes + out.nbytes) / READ_BYTES_PER_US
    report(f"linear {name} {num_rows}", us, floor_us, cublas_us=round(cublas_us, 2))


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
