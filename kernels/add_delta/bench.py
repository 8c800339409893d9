"""Adding deltas to Llama-3-8B rows: python -m kernels.add_delta.bench"""

from __future__ import annotations

from functools import partial

import torch

from kernels.add_delta.reference import add_delta as add_delta_reference
from kernels.add_delta.triton import add_delta
from kernels.timing import READ_BYTES_PER_US, graph_us, num_copies, report

WIDTH = 4096


def main() -> int:
    torch.manual_seed(0)
    for num_rows in (1, 64, 256):
        nbytes = 3 * num_rows * WIDTH * 2
        slots = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        buffers = [(_randn(num_rows), _randn(num_rows)) for _ in range(num_copies(nbytes))]
        y, delta = buffers[0]
        want = y.clone()
        add_delta_reference(want, delta, slots)
        add_delta(y, delta, slots)
        torch.testing.assert_close(y, want, rtol=0, atol=0)
        calls = [partial(add_delta, y, delta, slots) for y, delta in buffers]
        report(f"add_delta {num_rows} x {WIDTH}", graph_us(calls), nbytes / READ_BYTES_PER_US)
    return 0


def _randn(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, dtype=torch.bfloat16, device="cuda")


if __name__ == "__main__":
    raise SystemExit(main())
