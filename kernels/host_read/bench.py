"""A step's inputs on their way beside adapters' copies, by the copy engine and by a kernel.

    python -m kernels.host_read.bench

Time from the issue to the arrival on one stream, with so many copies of 2 MiB issued before on another;
median of 20.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.host_read.triton import read_host

PAGE = 1 << 20
MAX_BACKLOG = 200


def main() -> int:
    pool = torch.zeros(MAX_BACKLOG, PAGE, dtype=torch.bfloat16, device="cuda")
    pages = torch.zeros(MAX_BACKLOG, PAGE, dtype=torch.bfloat16, pin_memory=True)
    for nbytes in (8 << 10, 64 << 10, 256 << 10):
        source = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
        out = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        read_host(source, out)
        assert torch.equal(out.cpu(), source)
        for backlog in (0, 40, MAX_BACKLOG):
            engine, kernel = (
                measure(call, pool[:backlog], pages[:backlog])
                for call in (partial(out.copy_, source, non_blocking=True), partial(read_host, source, out))
            )
            sys.stdout.write(
                f"{nbytes >> 10:4} KiB behind {backlog:3} copies: "
                f"{engine:8.1f} us by the engine, {kernel:6.1f} us by a kernel\n"
            )
    return 0


def measure(call: Callable[[], object], pool: torch.Tensor, pages: torch.Tensor) -> float:
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    times: list[float] = []
    for _ in range(20):
        torch.cuda.synchronize()
        with torch.cuda.stream(copies):
            for target, source in zip(pool, pages, strict=True):
                target.copy_(source, non_blocking=True)
        start, end = new_event(), new_event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    raise SystemExit(main())
