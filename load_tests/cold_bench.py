"""What cold adapters cost, those who ask for them and everybody else, on one GPU.

    python -m load_tests.cold_bench [--out load_tests/results] [--seconds 20] [--only copy storm]

Model: Llama-3-8B shape, bf16, random weights; all-linear adapters, in host memory before the clock starts
(equal bytes under different digests). Requests are greedy and ignore EOS. Seed 0.

  copy      an adapter of rank 16 from pinned memory into the pool, nothing else running, against one plain
            copy of as many bytes into one tensor; median of 20
  ttft      64 prompt tokens: the first token of a cold adapter against the same adapter resident, alone and
            beside 64 streams of 64 other resident adapters; median of 15
  storm     64 streams of 64 resident adapters; 64 requests for 64 others come at once, of 1 or 64 prompt
            tokens and 16 output tokens: time between two tokens of the streams, cold storm against resident
            storm (prompts of 1 token: next to no prefill, so that copies would show); each in an
            engine of its own at the same step; median of 3 pairs, and the least and the greatest of them
  thrash    16 adapters of rank 16 in turn, 12 requests a second, 512 + 64 tokens: median time to first token
            with 8 slots against 16
  slora-s2  the workload of S-LoRA (arXiv:2311.03285): ranks 64, 32, 16, 8 in turn, adapters uniform, prompts
            and outputs uniform in [8, 512), Poisson arrivals of 20 a second; n adapters behind one replica.
            Saturated: the same requests, 64 of them at any time
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.plan import AdapterLoad, StepPlan
from engine.request import GenerateRequest
from engine.runner.cuda import CudaRunner
from load_tests.conditions import gpu_conditions
from load_tests.random_engine import (
    PAGE_TOKENS,
    SHAPE,
    SPEC,
    RandomEngine,
    as_in_serving,
    random_image,
    random_weights,
)

COMMAND = "python -m load_tests.cold_bench"
MAX_MODEL_LEN = 2048
NUM_PAGES = 40_000  # of 2 MiB
NUM_STREAMS = 64
NUM_CALM_STEPS = 100  # before a storm
NUM_STORMS = 3
CONFIG = EngineConfig(
    model="random", device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, max_rank=64,
    max_adapters=512, host_cache_bytes=1 << 42, prefix_cache=False, prefetch=False,
)  # fmt: skip

CASES = ("copy", "ttft", "storm", "thrash", "slora-s2")

Row = dict[str, Any]


@dataclass(slots=True)
class Timeline:
    """When each request was sent and when its tokens came, in seconds."""

    sent: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, list[float]] = field(default_factory=dict)

    def ttft(self, request_id: str) -> float:
        return self.tokens[request_id][0] - self.sent[request_id]

    def gaps(self, request_ids: Sequence[str], since: float, until: float) -> list[float]:
        """Between tokens of a request, of those that end in the window."""
        times = [self.tokens[request_id] for request_id in request_ids]
        return [b - a for row in times for a, b in itertools.pairwise(row) if since <= b <= until]


class Client:
    def __init__(self, engine: RandomEngine) -> None:
        self.engine = engine
        self.timeline = Timeline()
        self._rng = random.Random(0)

    def send(self, request_id: str, num_prompt: int, num_output: int, adapter: str | None) -> None:
        request = self.make(request_id, num_prompt, num_output, adapter)
        self.submit(request, time.perf_counter())

    def make(self, request_id: str, num_prompt: int, num_output: int, adapter: str | None) -> GenerateRequest:
        prompt = [self._rng.randrange(SHAPE.vocab_size) for _ in range(num_prompt)]
        return self.engine.request(request_id, prompt, num_output, adapter)

    def submit(self, request: GenerateRequest, sent: float) -> None:
        self.timeline.sent[request.request_id] = sent
        self.timeline.tokens[request.request_id] = []
        self.engine.core.add_request(request)

    def turn(self) -> None:
        events = self.engine.turn()
        now = time.perf_counter()
        for event in events:
            if event.token_id is not None:
                self.timeline.tokens[event.request_id].append(now)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.turn()

    def drain(self) -> None:
        self.run_until(lambda: self.engine.core.is_idle)

    def burst(self, kind: str, adapters: Sequence[str], num_prompt: int) -> tuple[float, float]:
        """A request of 16 output tokens for each at once; when they began and ended."""
        began = time.perf_counter()
        for name in adapters:
            self.send(f"{kind} {name}", num_prompt, 16, name)
        tokens = [self.timeline.tokens[f"{kind} {name}"] for name in adapters]
        self.run_until(lambda: all(len(times) == 16 for times in tokens))
        return began, time.perf_counter()

    def replay(self, arrivals: Sequence[tuple[float, GenerateRequest]]) -> float:
        """Open loop, in real time; returns the seconds until the last token."""
        started = time.perf_counter()
        waiting = list(reversed(arrivals))
        while waiting or not self.engine.core.is_idle:
            now = time.perf_counter() - started
            while waiting and waiting[-1][0] <= now:
                arrival, request = waiting.pop()
                self.submit(request, started + arrival)
            if self.engine.core.is_idle:
                time.sleep(0.0005)
            else:
                self.turn()
        return time.perf_counter() - started


class Bench:
    def __init__(self) -> None:
        self._runner = CudaRunner(SPEC, random_weights(), CONFIG, NUM_PAGES, PAGE_TOKENS, MAX_MODEL_LEN)
        self._runner.warm_up()
        as_in_serving()

    def client(self, ranks: dict[str, int], num_slots: int = CONFIG.max_adapters) -> Client:
        """An engine with an empty pool over the same graphs; `ranks`: adapters in host memory."""
        gc.collect()  # of the engine before: not while another one is measured
        config = replace(CONFIG, max_adapters=num_slots)
        engine = RandomEngine(self._runner, config, NUM_PAGES, MAX_MODEL_LEN, ranks)
        engine.read(ranks)
        return Client(engine)

    def copy_rate(self) -> list[Row]:
        image = random_image(16)
        page_ids = tuple(range(image.num_pages))
        source = torch.cat(list(image.pages)).pin_memory()
        target = torch.empty_like(source, device="cuda")

        def load() -> None:
            load = AdapterLoad("a", 0, page_ids, after_steps=False)
            self._runner.submit(StepPlan((), (), (load,), (), (), (), ()), {"a": image})

        def plain() -> None:
            target.copy_(source, non_blocking=True)

        issued: dict[Callable[[], None], list[float]] = {load: [], plain: []}
        arrived: dict[Callable[[], None], list[float]] = {load: [], plain: []}
        for _ in range(20):
            for call in (load, plain):
                torch.cuda.synchronize()
                started = time.perf_counter()
                call()
                issued[call].append(time.perf_counter() - started)
                torch.cuda.synchronize()
                arrived[call].append(time.perf_counter() - started)
            self._runner.collect()
        ours, theirs = (image.nbytes / statistics.median(times) / 1e9 for times in arrived.values())
        case = f"copy, r16, {image.nbytes >> 20} MiB"
        return [
            row(case, "adapter", ours, "GB/s", 45),
            row(case, "one plain copy", theirs, "GB/s"),
            row(case, "adapter over plain", ours / theirs, "x"),
            row(case, "adapter, time of the step loop", statistics.median(issued[load]) * 1e3, "ms"),
        ]

    def ttft(self, rank: int, num_streams: int) -> list[Row]:
        names = [f"cold-{i}" for i in range(15)]
        streams = [f"stream-{i}" for i in range(num_streams)]
        client = self.client(dict.fromkeys(names, rank) | dict.fromkeys(streams, 16))
        start_streams(client, streams)
        times: dict[str, list[float]] = {"cold": [], "resident": []}
        for kind, values in times.items():
            for name in names:
                request_id = f"{kind} {name}"
                client.turns(7 if num_streams else 0)
                client.send(request_id, 64, 1, name)
                client.run_until(lambda r=request_id: bool(client.timeline.tokens[r]))  # type: ignore[misc]
                values.append(client.timeline.ttft(request_id) * 1e3)
        stop(client)
        cold, resident = (statistics.median(values) for values in times.values())
        case = f"ttft, r{rank}, beside {num_streams} streams"
        must = {16: 5.0, 64: 15.0}[rank]
        return [
            row(case, "resident", resident, "ms"),
            row(case, "cold, more than resident", cold - resident, "ms", must),
        ]

    def storm(self, num_prompt: int) -> list[Row]:
        storms = [
            {kind: self._storm(num_prompt, kind == "resident") for kind in ("cold", "resident")}
            for _ in range(NUM_STORMS)
        ]
        case = f"storm, prompts of {num_prompt}"
        median = {kind: statistics.median(storm[kind] for storm in storms) for kind in ("resident", "cold")}
        more = [(storm["cold"] / storm["resident"] - 1) * 100 for storm in storms]
        return [
            *(row(case, f"p99 between tokens, {kind} adapters", p99, "ms") for kind, p99 in median.items()),
            *spread(case, "cold over resident", more, "%", 5),
        ]

    def _storm(self, num_prompt: int, is_resident: bool) -> float:
        """p99 of the time between two tokens of the streams, in ms."""
        streams = [f"stream-{i}" for i in range(NUM_STREAMS)]
        others = [f"other-{i}" for i in range(64)]
        client = self.client(dict.fromkeys(streams + others, 16))
        if is_resident:
            client.burst("before", others, num_prompt)
        start_streams(client, streams)
        client.turns(NUM_CALM_STEPS)
        window = client.burst("storm", others, num_prompt)
        gaps = client.timeline.gaps(streams, *window)
        stop(client)
        return percentile(gaps, 0.99) * 1e3

    def slora_s2(self, num_adapters: int, seconds: float) -> list[Row]:
        client = self.client(slora_ranks(num_adapters))
        arrivals = list(slora_requests(client, num_adapters, seconds))
        took = client.replay(arrivals)
        ttfts = [client.timeline.ttft(request.request_id) * 1e3 for _, request in arrivals]
        num_tokens = sum(map(len, client.timeline.tokens.values()))
        stats = client.engine.core.stats.adapters.values()
        hits, loads = (sum(getattr(s, name) for s in stats) for name in ("hbm_hits", "host_hits"))
        case = f"slora-s2, n={num_adapters}"
        return [
            row(case, "throughput", num_tokens / took, "tok/s"),
            row(case, "TTFT p50", percentile(ttfts, 0.5), "ms"),
            row(case, "TTFT p99", percentile(ttfts, 0.99), "ms"),
            row(case, "hits in HBM", 100 * hits / (hits + loads), "%"),
        ]

    def slora_s2_saturated(self, num_adapters: int, seconds: float) -> list[Row]:
        client = self.client(slora_ranks(num_adapters))
        requests = [request for _, request in slora_requests(client, num_adapters, seconds)]
        requests.reverse()
        running = 64
        for _ in range(running):
            client.submit(requests.pop(), time.perf_counter())
        started = time.perf_counter()
        # to the first moment without another request: how it ends would be another measurement
        while requests:
            for _ in range(running - len(client.engine.core.requests)):
                if requests:
                    client.submit(requests.pop(), time.perf_counter())
            client.turn()
        took = time.perf_counter() - started
        num_tokens = sum(map(len, client.timeline.tokens.values()))
        stop(client)
        return [row(f"slora-s2, saturated, n={num_adapters}", "throughput", num_tokens / took, "tok/s")]

    def thrash(self, seconds: float) -> list[Row]:
        medians = []
        for num_slots in (16, 8):
            client = self.client({f"a{i}": 16 for i in range(16)}, num_slots)
            arrivals = [
                (arrival, client.make(f"r{i}", 512, 64, f"a{i % 16}"))
                for i, arrival in enumerate(poisson(random.Random(0), 12.0, seconds))
            ]
            client.replay(arrivals)
            ttfts = [client.timeline.ttft(request.request_id) * 1e3 for _, request in arrivals]
            medians.append(percentile(ttfts, 0.5))
        fits, thrashes = medians
        return [
            row("thrash", "TTFT p50, 16 slots", fits, "ms"),
            row("thrash", "TTFT p50, 8 slots", thrashes, "ms"),
            row("thrash", "8 slots over 16", thrashes / fits, "x", 3),
        ]


def slora_ranks(num_adapters: int) -> dict[str, int]:
    return {f"a{i}": (64, 32, 16, 8)[i % 4] for i in range(num_adapters)}


def slora_requests(
    client: Client, num_adapters: int, seconds: float
) -> Iterator[tuple[float, GenerateRequest]]:
    """Arrivals and lengths are the same for any number of adapters."""
    rng, popularity = random.Random(42), random.Random(43)
    for i, arrival in enumerate(list(poisson(rng, 20.0, seconds))):
        adapter = f"a{popularity.randrange(num_adapters)}"
        request = client.make(f"r{i}", rng.randrange(8, 512), rng.randrange(8, 512), adapter)
        yield arrival, request


def start_streams(client: Client, names: Sequence[str], adapters: Sequence[str] | None = None) -> None:
    """Long requests, by default one for each adapter of these names; returns when all of them decode."""
    for name, adapter in zip(names, adapters or names, strict=True):
        client.send(name, 64, MAX_MODEL_LEN - 64, adapter)
    client.run_until(lambda: all(client.timeline.tokens[name] for name in names))
    client.turns(10)


def stop(client: Client) -> None:
    for request_id in list(client.engine.core.requests):
        client.engine.core.abort(request_id)
    client.drain()


def poisson(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    now = rng.expovariate(rate)
    while now < seconds:
        yield now
        now += rng.expovariate(rate)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(case: str, metric: str, value: float, unit: str, must: float | None = None) -> Row:
    return {"case": case, "metric": metric, "value": value, "unit": unit, "must": must}


def spread(case: str, metric: str, values: Sequence[float], unit: str, must: float) -> list[Row]:
    """What must hold of the median, and how far single runs were from it."""
    return [
        row(case, f"{metric}, median", statistics.median(values), unit, must),
        row(case, f"{metric}, least", min(values), unit),
        row(case, f"{metric}, greatest", max(values), unit),
    ]


def write_results(rows: list[Row], conditions: dict[str, str], directory: Path) -> None:
    (directory / "h200_cold.json").write_text(
        json.dumps({"command": COMMAND, "conditions": conditions, "rows": rows}, indent=2) + "\n"
    )
    lines = [
        "# Cold adapters on one H200",
        "",
        f"{', '.join(conditions.values())}. Written by `{COMMAND}`, which says what is measured.",
        "",
        "| case | metric | unit | lorafleet | must |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        must = "" if r["must"] is None else f"{r['must']:g}"
        lines.append(f"| {r['case']} | {r['metric']} | {r['unit']} | {r['value']:.2f} | {must} |")
    (directory / "h200_cold.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals in an open-loop case")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    args = parser.parse_args(argv)
    rows: list[Row] = []

    def add(*more: Row) -> None:
        rows.extend(more)
        for r in more:
            print(f"{r['case']:32} {r['metric']:40} {r['value']:10.2f} {r['unit']}", flush=True)

    bench = Bench()
    if "copy" in args.only:
        add(*bench.copy_rate())
    for rank, num_streams in itertools.product((16, 64), (0, NUM_STREAMS)):
        if "ttft" in args.only:
            add(*bench.ttft(rank, num_streams))
    for num_prompt in (1, 64):
        if "storm" in args.only:
            add(*bench.storm(num_prompt))
    for run in (bench.slora_s2, bench.slora_s2_saturated):
        first = 0.0
        for num_adapters in (5, 100, 1000, 2000) if "slora-s2" in args.only else ():
            measured = run(num_adapters, args.seconds)
            first = first or measured[0]["value"]
            drop = (1 - measured[0]["value"] / first) * 100
            add(*measured, row(measured[0]["case"], "throughput below n=5", drop, "%", 10))
    if "thrash" in args.only:
        add(*bench.thrash(args.seconds / 2))
    if args.out:
        write_results(rows, gpu_conditions(), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
