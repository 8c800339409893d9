"""How long launches take on a GPU, for the benches: graphs of calls that each have buffers of their own.

Knows nothing of any op.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

READ_BYTES_PER_US = 4_531_000  # of a kernel that only reads, measured on an H200
FLOPS_PER_US = 764e6  # of an 8192^3 bf16 product, measured on an H200
COLD_BYTES = 160 << 20  # 2.5 times the L2 of an H200


def num_copies(nbytes: int, least: int = 8) -> int:
    """Buffers of `nbytes` to go through in turn, so that none is in the L2 when it is read again."""
    return max(least, -(-COLD_BYTES // nbytes))


def graph_us(calls: Sequence[Callable[[], object]], num_replays: int = 15) -> float:
    """Median over replays of one graph of all `calls`, over their number."""
    for call in calls[:2]:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    times: list[float] = []
    for _ in range(num_replays + 3):
        start, end = new_event(), new_event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[3:])


def slowest_us(us: float) -> float:
    """Of all ranks of the default process group, on GPUs."""
    slowest = torch.tensor([us], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def report(case: str, us: float, floor_us: float, **more: float | str) -> None:
    """One JSON line."""
    record = {
        "case": case,
        "us": round(us, 2),
        "floor_us": round(floor_us, 2),
        "times_floor": round(us / floor_us, 2),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **more,
    }
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
