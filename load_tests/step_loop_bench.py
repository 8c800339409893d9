"""The host's part of a decode step: what a GPU would wait for if it were faster than that.

    python -m load_tests.step_loop_bench [--out load_tests/results]

The engine's step loop as it serves (prefix cache, events encoded for the client), with a runner that computes
nothing: it writes a step's inputs as the GPU backend does, in Python and numpy, and gives each row a token at
once. No GPU, no model. Left out: the launches, and sampling's settings.

  turn    one step of the loop, milliseconds of one CPU core; fastest of 20 rounds of 20 steps
  inputs  of it, the step's integers and the lists of adapters
  events  of it, encoding what goes to the client
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.adapters.image import AdapterImage
from engine.config import EngineConfig
from engine.heap import keep_what_is_there
from engine.plan import StepPlan
from engine.runner.base import SampledToken
from engine.runner.step_inputs import StepInputs
from engine.sampling_params import SamplingParams
from engine.wire import encode_event, encode_frame
from kernels.sgmv.lists import lists_size, write_lists
from kernels.sgmv.plan import decode_plan
from load_tests.conditions import commit
from load_tests.random_engine import PAGE_TOKENS, SHAPE, RandomEngine

NUM_PAGES, MAX_MODEL_LEN, MAX_SEQS, MAX_TOKENS = 40_000, 2048, 256, 8192
NUM_ADAPTERS, RANK = 64, 16
PROMPT, LONG_PROMPT, ROUNDS, ROUND_STEPS = 64, 1500, 20, 20
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


def measure(batch: int, num_adapters: int, num_prompt: int) -> dict[str, float]:
    """Milliseconds a step, of `batch` requests that decode."""
    config = EngineConfig(
        model="random", device="cpu", max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_rank=RANK,
        max_adapters=NUM_ADAPTERS, host_cache_bytes=1 << 40,
    )  # fmt: skip
    runner = HostOnly()
    names = [f"a{i}" for i in range(num_adapters)]
    engine = RandomEngine(runner, config, NUM_PAGES, MAX_MODEL_LEN, dict.fromkeys(names, RANK))
    engine.read(names)
    rng = random.Random(0)
    for i in range(batch):
        prompt = [rng.randrange(SHAPE.vocab_size) for _ in range(num_prompt)]
        adapter = names[i % num_adapters] if names else None
        engine.core.add_request(engine.request(str(i), prompt, MAX_MODEL_LEN - num_prompt, adapter))
    while len(engine.turn()) < batch:
        pass
    rounds = [_round(engine, runner, batch) for _ in range(ROUNDS)]
    return min(rounds, key=lambda r: r["turn"])


def _round(engine: RandomEngine, runner: HostOnly, batch: int) -> dict[str, float]:
    runner.inputs_s = encode_s = 0.0
    began = time.perf_counter()
    for _ in range(ROUND_STEPS):
        events = engine.turn()
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
    cases = [*itertools.product((0, NUM_ADAPTERS), (1, 64, MAX_SEQS), (PROMPT,))]
    for num_adapters, batch, num_prompt in [*cases, (NUM_ADAPTERS, MAX_SEQS, LONG_PROMPT)]:
        case = {"adapters": num_adapters, "batch": batch, "prompt": num_prompt}
        rows.append(case | measure(batch, num_adapters, num_prompt))
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
        sys.stdout.flush()
    if args.out:
        conditions = f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, ms of one, {commit()}"
        result = {"command": COMMAND, "conditions": conditions, "rows": rows}
        (args.out / "step_loop.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
