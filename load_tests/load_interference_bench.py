"""What reading adapters does to a step loop beside it: in threads of its process, or in one of their own.

    python -m load_tests.load_interference_bench [--uri s3://bucket/prefix] [--loads 8] [--out FILE.json]

Stands in for the loop: one thread that runs small PyTorch ops, each of which lets go of the GIL, in steps of
about 3 ms. Beside it an all-linear adapter of rank 16 of Llama-3-8B shape, 80 MiB, is read that many times at
once, from a new directory or from --uri (credentials and AWS_ENDPOINT_URL as usual). Shown is how long steps
take; checks that both readers give the same bytes. Loads, steps and whatever serves --uri share this
machine's cores: where these are few, the process slows the steps as well, though not by the GIL.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.adapters.host_memory import HostArena
from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import ImageReader, LocalReader, WantedImage
from engine.adapters.remote_reader import RemoteReader
from engine.config import EngineConfig
from load_tests.pack_bench import FORMAT, write_random_adapter

OPS_PER_STEP = 1000
CONFIG = EngineConfig(model="unused", max_parallel_loads=32)


class StepLoop:
    def __init__(self) -> None:
        self._is_over = False
        self.ends: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> StepLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def steps(self, began: float, ended: float) -> list[float]:
        """Seconds of each step between the two times."""
        ends = [end for end in self.ends if began <= end <= ended]
        return [after - before for before, after in itertools.pairwise(ends)]

    def _run(self) -> None:
        x = torch.zeros(64, 64)
        while not self._is_over:
            for _ in range(OPS_PER_STEP):
                x.add_(1.0)
            self.ends.append(time.perf_counter())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--uri")
    parser.add_argument("--loads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)
    with adapter(args.uri) as uri:
        rows = [
            alone(),
            *(measure(kind, uri, args.loads, args.rounds) for kind in (LocalReader, RemoteReader)),
        ]
    source = "S3" if args.uri else "a directory"
    print(
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}; {args.loads} loads from {source}"
    )
    for row in rows:
        print(
            "{case:22} steps p50 {p50:6.1f} ms, p99 {p99:6.1f} ms, max {max:6.1f} ms; "
            "all loads {loads:.2f} s".format(**row)
        )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows[1]["contents"] == rows[2]["contents"] else 1


@contextmanager
def adapter(uri: str | None) -> Iterator[str]:
    if uri is not None:
        yield uri
        return
    with tempfile.TemporaryDirectory() as path:
        write_random_adapter(path, 16, torch.bfloat16)
        yield path


def alone() -> dict[str, Any]:
    with StepLoop() as loop:
        began = time.perf_counter()
        time.sleep(3.0)
        steps = loop.steps(began, time.perf_counter())
    return row("alone", steps, 0.0)


def measure(
    kind: Callable[[EngineConfig], ImageReader], uri: str, num_loads: int, rounds: int
) -> dict[str, Any]:
    """The first round is in fresh memory, the others are not."""
    arena = HostArena(FORMAT.page_elems, FORMAT.dtype)
    form = replace(FORMAT, arena=arena)
    reader = kind(CONFIG)

    def read(_: int) -> AdapterImage:
        return reader.read(WantedImage(uri, None, form))

    image = read(0)  # when it is there, imports are done
    steps, seconds = [], []
    contents = {content(image)}
    with ThreadPoolExecutor(num_loads) as threads, StepLoop() as loop:
        for _ in range(rounds):
            began = time.perf_counter()
            images = list(threads.map(read, range(num_loads)))
            ended = time.perf_counter()
            contents |= {content(image) for image in images[-1:]}
            del images
            steps += loop.steps(began, ended)
            seconds.append(ended - began)
    reader.close()
    name = "beside threads" if kind is LocalReader else "beside a process"
    return row(name, steps, sorted(seconds)[rounds // 2]) | {"contents": sorted(contents)}


def content(image: AdapterImage) -> str:
    """A digest of its pages."""
    digest = hashlib.sha256()
    for page in image.pages:
        digest.update(page.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def row(case: str, steps: list[float], loads: float) -> dict[str, Any]:
    """Milliseconds of steps."""
    ms = sorted(1e3 * step for step in steps)
    at = {"p50": ms[len(ms) // 2], "p99": ms[int(0.99 * len(ms))], "max": ms[-1]}
    return {"case": case, "steps": len(ms), **at, "loads": loads}


if __name__ == "__main__":
    raise SystemExit(main())
