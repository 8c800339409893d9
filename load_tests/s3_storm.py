"""A storm of adapters that are only in S3, beside streams that run, on one GPU.

    AWS_ENDPOINT_URL=http://127.0.0.1:8333 python -m load_tests.s3_storm [--out load_tests/results]

Needs an S3 and credentials in the usual AWS variables; makes the bucket `lorafleet-storm` and removes it.
Model: Llama-3-8B shape, bf16, random weights; 40 all-linear adapters of rank 16, 80 MiB each, read as in
serving, by other processes. 64 streams of 8 adapters decode. Then the other 32 are wanted at once. Shown is
the time between two tokens of the streams, each time from the same step of an engine of its own, so that
contexts are as long:

  loading    the 32 are loaded into host memory
  calm       nothing else happens for as many steps
  storm      32 requests for them, of 1 or 64 prompt tokens and 16 output tokens, until the last has ended
  resident   the same requests, when the adapters are in the pool

Medians of 3.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import boto3
import torch
from safetensors.torch import save

from engine.adapters.host_memory import HostArena
from engine.adapters.image import ImageFormat
from engine.adapters.loader import AdapterLoader, LoadResult
from engine.adapters.reader_pool import start_readers
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loop import Inbox
from engine.runner.cuda import CudaRunner
from engine.shape import BLOCKS, NUM_PROJECTIONS, PROJECTIONS
from load_tests.cold_bench import (
    MAX_MODEL_LEN,
    NUM_CALM_STEPS,
    NUM_PAGES,
    NUM_STREAMS,
    Client,
    Row,
    percentile,
    row,
    spread,
    start_streams,
    stop,
)
from load_tests.conditions import gpu_conditions
from load_tests.random_engine import PAGE_TOKENS, SHAPE, SPEC, RandomEngine, as_in_serving, random_weights

COMMAND = "python -m load_tests.s3_storm"
BUCKET = "lorafleet-storm"
RANK = 16
NUM_SHARED = 8  # adapters of the streams
NUM_ADAPTERS = NUM_SHARED + 32
ADAPTER_BYTES = 80 << 20
NUM_RUNS = 3
CONFIG = EngineConfig(
    model="random", device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, max_rank=64,
    max_adapters=64, host_cache_bytes=64 << 30, prefix_cache=False, prefetch=False,
)  # fmt: skip


@contextmanager
def uploaded(prefixes: Sequence[str]) -> Iterator[None]:
    """An adapter at each, all of different bytes."""
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    config = json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK})
    tensors = {}
    for layer in range(SHAPE.num_layers):
        for projection in range(NUM_PROJECTIONS):
            name = f"base_model.model.model.layers.{layer}.{BLOCKS[projection]}.{PROJECTIONS[projection]}"
            widths = SHAPE.widths(projection)
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, widths.in_features).bfloat16()
            tensors[f"{name}.lora_B.weight"] = torch.randn(widths.out_features, RANK).bfloat16()
    weights = save(tensors)
    keys = [
        f"{prefix}/{name}"
        for prefix in prefixes
        for name in ("adapter_config.json", "adapter_model.safetensors")
    ]

    def put(number: int) -> None:
        client.put_object(Bucket=BUCKET, Key=f"{prefixes[number]}/adapter_config.json", Body=config.encode())
        own = weights[:-2] + torch.tensor([number], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
        client.put_object(Bucket=BUCKET, Key=f"{prefixes[number]}/adapter_model.safetensors", Body=own)

    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(put, range(len(prefixes))))
        yield
    finally:
        for key in keys:
            client.delete_object(Bucket=BUCKET, Key=key)
        client.delete_bucket(Bucket=BUCKET)


class Source:
    """Reads adapters for the engines, one after the other."""

    def __init__(self) -> None:
        page_elems = SHAPE.page_elems(PAGE_TOKENS)
        arena = HostArena(page_elems, torch.bfloat16, is_pinned=True)
        arena.reserve(4 << 30).join()
        form = ImageFormat(SHAPE, page_elems, torch.bfloat16, CONFIG.max_rank, arena=arena)
        self.loader = AdapterLoader(form, CONFIG, self._hand_over, reader=start_readers(CONFIG))
        self._inbox: Inbox
        self._core: EngineCore | None = None

    def engine(self, runner: CudaRunner, names: Sequence[str]) -> RandomEngine:
        """With nothing in host memory or the pool, over the runner's graphs."""
        self._core = None
        gc.collect()  # what the engine before had, adapters too: not while this one is measured
        ranks = dict.fromkeys(names, RANK)
        engine = RandomEngine(
            runner, CONFIG, NUM_PAGES, MAX_MODEL_LEN, ranks, make_loader=self._serve, source=f"s3://{BUCKET}"
        )
        self._core = engine.core
        return engine

    def _serve(self, inbox: Inbox) -> AdapterLoader:
        self._inbox = inbox
        return self.loader

    def _hand_over(self, result: LoadResult) -> None:
        assert self._core is not None
        self._inbox.put(partial(self._core.on_loaded, result))


class Run:
    """Streams of an engine of their own."""

    def __init__(self, source: Source, runner: CudaRunner, names: Sequence[str]) -> None:
        self.client = Client(source.engine(runner, names))
        self.others = names[NUM_SHARED:]
        self._shared = names[:NUM_SHARED]
        self._streams = [f"stream {i}" for i in range(NUM_STREAMS)]

    def start(self) -> None:
        adapters = [self._shared[i % NUM_SHARED] for i in range(NUM_STREAMS)]
        start_streams(self.client, self._streams, adapters)
        self.client.turns(NUM_CALM_STEPS)

    def end(self, began: float, ended: float) -> float:
        """p99 of the streams in that time, ms."""
        gaps = self.client.timeline.gaps(self._streams, began, ended)
        stop(self.client)
        return percentile(gaps, 0.99) * 1e3


class Bench:
    def __init__(self, names: Sequence[str]) -> None:
        runner = CudaRunner(SPEC, random_weights(), CONFIG, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN)
        runner.warm_up()
        self.source = Source()
        self._run = partial(Run, self.source, runner, names)
        as_in_serving()

    def loads(self) -> Iterator[Row]:
        loads = [self._load() for _ in range(NUM_RUNS)]
        calms = [self._stay_calm(num_steps) for _, _, num_steps in loads]
        case = "32 loads from S3"
        yield row(case, "p99 between tokens, calm", statistics.median(calms), "ms")
        yield row(case, "p99 between tokens, loading", statistics.median(p99 for p99, _, _ in loads), "ms")
        more = [(p99 / calm - 1) * 100 for (p99, _, _), calm in zip(loads, calms, strict=True)]
        yield from spread(case, "loading over calm", more, "%", 5)
        yield row(case, "read and packed", statistics.median(rate for _, rate, _ in loads), "GB/s")
        yield row(case, "steps meanwhile", statistics.median(num_steps for _, _, num_steps in loads), "")

    def storms(self, num_prompt: int) -> Iterator[Row]:
        case = f"S3 storm, prompts of {num_prompt}"
        colds = [self._storm(num_prompt, is_resident=False) for _ in range(NUM_RUNS)]
        residents = [self._storm(num_prompt, is_resident=True) for _ in range(NUM_RUNS)]
        for kind, storms in (("resident", residents), ("cold", colds)):
            yield row(case, f"p99 between tokens, {kind}", statistics.median(p99 for p99, _ in storms), "ms")
        more = [(cold / other - 1) * 100 for (cold, _), (other, _) in zip(colds, residents, strict=True)]
        yield from spread(case, "cold over resident", more, "%", 5)
        yield row(case, "TTFT p50, cold", statistics.median(ttft for _, ttft in colds), "ms")

    def _load(self) -> tuple[float, float, int]:
        """p99 of the streams in ms, GB/s, and the number of steps."""
        run = self._run()
        run.start()
        engine = run.client.engine
        began = time.perf_counter()
        engine.load(run.others)
        num_steps = 0
        while not engine.holds(run.others):
            run.client.turn()
            num_steps += 1
        ended = time.perf_counter()
        return run.end(began, ended), len(run.others) * ADAPTER_BYTES / (ended - began) / 1e9, num_steps

    def _stay_calm(self, num_steps: int) -> float:
        """p99 of the streams in ms."""
        run = self._run()
        run.start()
        began = time.perf_counter()
        run.client.turns(num_steps)
        return run.end(began, time.perf_counter())

    def _storm(self, num_prompt: int, is_resident: bool) -> tuple[float, float]:
        """p99 of the streams, and the requests' median time to first token, in ms."""
        run = self._run()
        if is_resident:
            run.client.burst("before", run.others, num_prompt)
        run.start()
        window = run.client.burst("storm", run.others, num_prompt)
        ttfts = [run.client.timeline.ttft(f"storm {name}") for name in run.others]
        return run.end(*window), statistics.median(ttfts) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    names = [f"a{i}" for i in range(NUM_ADAPTERS)]
    bench = Bench(names)
    rows: list[Row] = []
    with uploaded(names):
        for r in itertools.chain(bench.loads(), bench.storms(1), bench.storms(64)):
            rows.append(r)
            print(f"{r['case']:28} {r['metric']:40} {r['value']:10.2f} {r['unit']}", flush=True)
    bench.source.loader.close()
    if args.out:
        result = {
            "command": COMMAND,
            "endpoint": os.environ.get("AWS_ENDPOINT_URL"),
            **gpu_conditions(),
            "rows": rows,
        }
        (args.out / "h200_s3_storm.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
