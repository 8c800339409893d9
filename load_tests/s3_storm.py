"""A storm of adapters that are only in S3, beside streams that run, on one GPU.

    AWS_ENDPOINT_URL=http://127.0.0.1:8333 python -m load_tests.s3_storm [--out load_tests/results]

Needs an S3 and credentials in the usual AWS variables; makes the bucket `lorafleet-storm` and removes it.
Model: Llama-3-8B shape, bf16, random weights; 40 all-linear adapters of rank 16, 80 MiB each. 64 streams of
8 adapters decode, then 32 requests for the other 32 come at once, of 1 or 64 prompt tokens and 16 output
tokens. They are read as in serving, by other processes. Shown is the time between two tokens of the streams:

  before    nothing else runs
  loading   adapters arrive from S3; no request of the storm has started yet
  storm     from the first request to the end of the last one
  resident  the same requests once more, when all adapters are in the pool

Medians of 3 storms, each with nothing in host memory or the pool.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import boto3
import torch
from safetensors.torch import save

from engine.adapters.host_memory import HostArena
from engine.adapters.image import ImageFormat
from engine.adapters.loader import AdapterLoader
from engine.adapters.reader_pool import start_readers
from engine.config import EngineConfig
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
    is_over,
    percentile,
    row,
    spread,
    start_streams,
    stop,
)
from load_tests.random_engine import PAGE_TOKENS, SHAPE, SPEC, RandomEngine, as_in_serving, random_weights

BUCKET = "lorafleet-storm"
RANK = 16
NUM_SHARED = 8  # adapters of the streams
NUM_ADAPTERS = NUM_SHARED + 32
NUM_STORMS = 3
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


def make_loader(inbox: Inbox, engine: list[RandomEngine]) -> AdapterLoader:
    page_elems = SHAPE.page_elems(PAGE_TOKENS)
    arena = HostArena(page_elems, torch.bfloat16, is_pinned=True)
    form = ImageFormat(SHAPE, page_elems, torch.bfloat16, CONFIG.max_rank, arena=arena)
    arena.reserve(4 << 30).join()
    # the core is there before the first load can end
    return AdapterLoader(
        form,
        CONFIG,
        lambda result: inbox.put(lambda: engine[0].core.on_loaded(result)),
        reader=start_readers(CONFIG),
    )


@dataclass(frozen=True)
class Measured:
    p99: dict[str, float]  # between tokens of the streams, ms
    ttft_p50: float  # ms
    ttft_p99: float
    rate: float  # from S3 to the first token of the last, GB/s


class Storm:
    def __init__(self, runner: CudaRunner, names: Sequence[str]) -> None:
        engine: list[RandomEngine] = []
        engine.append(
            RandomEngine(
                runner,
                CONFIG,
                NUM_PAGES,
                MAX_MODEL_LEN,
                dict.fromkeys(names, RANK),
                make_loader=partial(make_loader, engine=engine),
                source=f"s3://{BUCKET}",
            )
        )
        self.client = Client(engine[0])
        self._streams = [f"stream {i}" for i in range(NUM_STREAMS)]
        self._shared, self._others = names[:NUM_SHARED], names[NUM_SHARED:]

    def run(self, num_prompt: int) -> Measured:
        client, timeline = self.client, self.client.timeline
        start_streams(client, self._streams, [self._shared[i % NUM_SHARED] for i in range(NUM_STREAMS)])
        began = time.perf_counter()
        client.turns(NUM_CALM_STEPS)
        gaps = {"before": timeline.gaps(self._streams, began, time.perf_counter())}
        began, ended = self._requests("storm", num_prompt)
        storm = [f"storm {name}" for name in self._others]
        first = min(timeline.tokens[request][0] for request in storm)
        gaps["loading"] = timeline.gaps(self._streams, began, first)
        gaps["storm"] = timeline.gaps(self._streams, began, ended)
        gaps["resident"] = timeline.gaps(self._streams, *self._requests("resident", num_prompt))
        ttfts = [timeline.ttft(request) * 1e3 for request in storm]
        seconds = max(timeline.tokens[request][0] for request in storm) - began
        stop(client)
        client.engine.loader.close()
        p99 = {name: percentile(values, 0.99) * 1e3 for name, values in gaps.items()}
        rate = len(storm) * 80 * 2**20 / seconds / 1e9
        return Measured(p99, percentile(ttfts, 0.5), percentile(ttfts, 0.99), rate)

    def _requests(self, kind: str, num_prompt: int) -> tuple[float, float]:
        """For all others at once; when they began and ended."""
        began = time.perf_counter()
        for name in self._others:
            self.client.send(f"{kind} {name}", num_prompt, 16, name)
        self.client.run_until(
            lambda: all(is_over(self.client, f"{kind} {name}", 16) for name in self._others)
        )
        ended = time.perf_counter()
        self.client.turns(20)
        return began, ended


def rows_of(case: str, storms: Sequence[Measured]) -> list[Row]:
    def over(name: str, other: str) -> list[float]:
        return [(storm.p99[name] / storm.p99[other] - 1) * 100 for storm in storms]

    p99 = {name: statistics.median(storm.p99[name] for storm in storms) for name in storms[0].p99}
    return [
        *(row(case, f"p99 between tokens, {name}", value, "ms") for name, value in p99.items()),
        *spread(case, "loading over before", over("loading", "before"), "%", 5),
        *spread(case, "storm over resident", over("storm", "resident"), "%", 5),
        row(case, "TTFT p50", statistics.median(storm.ttft_p50 for storm in storms), "ms"),
        row(case, "TTFT p99", statistics.median(storm.ttft_p99 for storm in storms), "ms"),
        row(case, "S3 to the first token of the last", statistics.median(s.rate for s in storms), "GB/s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    runner = CudaRunner(SPEC, random_weights(), CONFIG, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN)
    runner.warm_up()
    as_in_serving()
    names = [f"a{i}" for i in range(NUM_ADAPTERS)]
    rows: list[Row] = []
    with uploaded(names):
        for num_prompt in (1, 64):
            storms = [Storm(runner, names).run(num_prompt) for _ in range(NUM_STORMS)]
            measured = rows_of(f"S3 storm, prompts of {num_prompt}", storms)
            rows += measured
            for r in measured:
                print(f"{r['case']:28} {r['metric']:40} {r['value']:10.2f} {r['unit']}", flush=True)
    if args.out:
        result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        (args.out / "h200_s3_storm.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
