"""The host's part of a decode step: what a GPU would wait for if it were faster than that.

    python -m load_tests.step_loop_bench [--out load_tests/results]

The engine's step loop as it serves (prefix cache, stop tokens, events encoded for the client), with a runner
that computes nothing: it writes a step's inputs as the GPU backend does, in Python and numpy, and gives each
row a token at once. No GPU, no model. Left out: the launches, about 0.1 ms a step, and sampling's settings.

  turn    one step of the loop, milliseconds of one CPU core; fastest of 20 rounds of 20 steps
  inputs  of it, the step's integers and the lists of adapters
  events  of it, encoding what goes to the client
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from engine.adapters.image import AdapterImage
from engine.adapters.loader import LoadResult
from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.core import EngineCore, Geometry
from engine.errors import AdapterRefused
from engine.heap import keep_what_is_there
from engine.loop import EngineLoop
from engine.plan import StepPlan
from engine.request import AdapterRef, GenerateRequest
from engine.runner.base import SampledToken
from engine.runner.step_inputs import StepInputs
from engine.sampling_params import SamplingParams
from engine.wire import encode_event, encode_frame
from kernels.sgmv.lists import lists_size, write_lists
from kernels.sgmv.plan import decode_plan

PAGE_TOKENS, NUM_PAGES, MAX_MODEL_LEN = 16, 24_000, 2048
MAX_SEQS, MAX_TOKENS, VOCAB = 256, 8192, 128_256
NUM_ADAPTERS, RANK, ADAPTER_PAGES = 64, 16, 22
PROMPT, ROUNDS, ROUND_STEPS = 64, 20, 20
COMMAND = "python -m load_tests.step_loop_bench"


class HostOnly:
    """Writes inputs as CudaRunner does."""

    max_in_flight = 2
    copy_bytes_per_s = float("inf")

    def __init__(self) -> None:
        self.inputs_s = 0.0
        self._plan = decode_plan(MAX_SEQS, RANK)
        self._inputs = StepInputs(
            MAX_TOKENS, MAX_SEQS, MAX_MODEL_LEN // PAGE_TOKENS, lists_size(self._plan), PAGE_TOKENS, {},
            torch.device("cpu"),
        )  # fmt: skip
        self._ranks = np.full(NUM_ADAPTERS, RANK, np.int32)
        self._slots: dict[str, int] = {}
        self._in_flight: list[list[SampledToken]] = []

    def start(
        self, request_id: str, params: SamplingParams, seed: int, prompt_token_ids: tuple[int, ...]
    ) -> None:
        self._slots[request_id] = len(self._slots)

    def finish(self, request_id: str) -> None:
        del self._slots[request_id]

    def submit(self, plan: StepPlan, images: Mapping[str, AdapterImage]) -> None:
        began = time.perf_counter()
        num_tokens = plan.num_tokens
        if num_tokens:
            rows = max(num_tokens, len(plan.chunks))
            batch = self._inputs.write(plan.chunks, rows, len(plan.chunks), self._slots.__getitem__)
            if batch.has_adapters and num_tokens <= MAX_SEQS:
                write_lists(self._plan, batch.segments, self._ranks, self._inputs.host["lists"])
        self.inputs_s += time.perf_counter() - began
        self._in_flight.append([SampledToken(c.request_id, 7, None) for c in plan.chunks if c.samples])

    def collect(self) -> list[SampledToken]:
        return self._in_flight.pop(0)

    def close(self) -> None: ...


class HostLoader:
    """Adapters are there at once, and are nothing but their size."""

    def __init__(self) -> None:
        self.done: list[LoadResult] = []

    def submit(self, ref: AdapterRef) -> None:
        image: Any = SimpleNamespace(
            digest=ref.name,
            num_pages=ADAPTER_PAGES,
            nbytes=ADAPTER_PAGES,
            rank=RANK,
            is_from_disk=False,
            report={},
        )
        self.done.append(LoadResult(ref, cast("AdapterImage", image), None, 0.0))

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        raise error

    def forget_failure(self, ref: AdapterRef) -> None: ...

    def close(self) -> None: ...


def measure(batch: int, num_adapters: int) -> dict[str, float]:
    """Milliseconds a step, of `batch` requests that decode."""
    config = EngineConfig(
        model="none", device="cpu", max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_rank=RANK,
        max_adapters=NUM_ADAPTERS, host_cache_bytes=1 << 40,
    )  # fmt: skip
    geometry = Geometry(NUM_PAGES, PAGE_TOKENS, 1, MAX_MODEL_LEN, VOCAB, (2,))
    runner, loader = HostOnly(), HostLoader()
    core = EngineCore(
        config,
        geometry,
        runner,
        AdapterManager(loader, config.host_cache_bytes, NUM_ADAPTERS),
        time.monotonic,
    )
    loop = EngineLoop(core, queue.SimpleQueue())
    refs = [AdapterRef(f"a{i}", f"none:/{i}", "") for i in range(num_adapters)]
    for ref in refs:
        core.load_adapter(ref.name, ref)
    for result in loader.done:
        core.on_loaded(result)
    core.take_events()
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - PROMPT, seed=0)
    for i in range(batch):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(PROMPT))
        core.add_request(GenerateRequest(str(i), prompt, params, refs[i % num_adapters] if refs else None))
    for _ in range(ROUND_STEPS):
        loop.turn(0.0)
    rounds = [_round(loop, runner, batch) for _ in range(ROUNDS)]
    return min(rounds, key=lambda r: r["turn"])


def _round(loop: EngineLoop, runner: HostOnly, batch: int) -> dict[str, float]:
    runner.inputs_s = encode_s = 0.0
    began = time.perf_counter()
    for _ in range(ROUND_STEPS):
        events = loop.turn(0.0)
        assert len(events) == batch
        turned = time.perf_counter()
        encode_frame({"events": [encode_event(event) for event in events]})
        encode_s += time.perf_counter() - turned
    seconds = {"turn": time.perf_counter() - began, "inputs": runner.inputs_s, "events": encode_s}
    return {name: value / ROUND_STEPS * 1e3 for name, value in seconds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_what_is_there()
    rows: list[dict[str, Any]] = []
    for num_adapters in (0, NUM_ADAPTERS):
        for batch in (1, 64, MAX_SEQS):
            rows.append({"adapters": num_adapters, "batch": batch, **measure(batch, num_adapters)})
            print(
                "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items())
            )
            sys.stdout.flush()
    if args.out:
        conditions = f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, ms of one"
        result = {"command": COMMAND, "conditions": conditions, "rows": rows}
        (args.out / "step_loop.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
