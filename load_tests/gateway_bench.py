"""What the way from HTTP to the engine costs, beside plain uvicorn and Ray Serve as it comes, in one run.

    python -m load_tests.gateway_bench [--out load_tests/results] [--rounds 3]

A fake engine, so every microsecond is the way's. Each server is measured alone, in rounds; medians:
- CPU of all processes of the server for each token, 32 streams of 50 tokens/s; with what an idle one takes in
  that time, and without (Ray's own processes are never quite idle)
- tokens/s of 32 streams as fast as they come
- time to the first token of one stream
`serve-default` sends each token by itself; `lorafleet serve` sends the first one at once, then what came in
`stream_interval_s`. Every stream is checked for its number of tokens and its end. Only ratios are of use on
another machine. Fails if one of `claims` does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from load_tests.conditions import machine
from load_tests.gateway_server import KINDS, WORD
from tests.cluster.serve_process import free_port

RESULTS = Path(__file__).parent / "results"
NUM_STREAMS = 32
PACED_US, PACED_TOKENS = 20_000, 150
UNPACED_TOKENS = 512
NUM_FIRST_TOKENS = 30
IDLE_S = 4.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Figures:
    cpu_us_per_token: float  # all processes, paced
    busy_cpu_us_per_token: float  # without what they take when idle
    unpaced_tokens_per_s: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Seen:
    first_token_s: float
    num_tokens: int
    is_done: bool


class Gateway:
    def __init__(self, kind: str, model: Path) -> None:
        self._port = free_port()
        # it must not take settings of a cluster that happens to run here
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        command = [sys.executable, "-m", "load_tests.gateway_server", kind, str(self._port), str(model)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"serving\n":
            raise RuntimeError(f"{kind} did not start")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5 if not children_of(self._process.pid) else 30)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(30)

    def cpu_s(self) -> float:
        """That all its processes have taken."""
        table = process_table()
        total, queue = 0.0, [self._process.pid]
        while queue:
            pid = queue.pop()
            total += table[pid][1] if pid in table else 0.0
            queue.extend(child for child, (parent, _) in table.items() if parent == pid)
        return total

    async def stream(self, num_tokens: int, interval_us: int) -> Seen:
        body = {
            "model": "base",
            "prompt": "abc",
            "max_tokens": num_tokens,
            "seed": interval_us,
            "stream": True,
        }
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + content)
        answer, first = b"", 0.0
        while piece := await reader.read(1 << 16):
            answer += piece
            if not first and WORD.encode() in answer:
                first = time.perf_counter() - started
        writer.close()
        # a chunk's border may part a word
        text = b"".join(
            line for line in answer.split(b"\r\n") if line.startswith(b"data: ") or b'"text"' in line
        )
        return Seen(first, text.count(WORD.encode()), b"data: [DONE]" in answer)

    async def streams(self, num_tokens: int, interval_us: int) -> float:
        """Seconds of all of them together. Checks them."""
        started = time.perf_counter()
        seen = await asyncio.gather(*(self.stream(num_tokens, interval_us) for _ in range(NUM_STREAMS)))
        seconds = time.perf_counter() - started
        assert all(one.is_done for one in seen)
        assert all(one.num_tokens == num_tokens for one in seen), [one.num_tokens for one in seen]
        return seconds

    async def measure(self) -> Figures:
        idle_from = self.cpu_s()
        await asyncio.sleep(IDLE_S)
        idle_rate = (self.cpu_s() - idle_from) / IDLE_S
        cpu_from = self.cpu_s()
        seconds = await self.streams(PACED_TOKENS, PACED_US)
        cpu = self.cpu_s() - cpu_from
        count = NUM_STREAMS * PACED_TOKENS
        unpaced_s = await self.streams(UNPACED_TOKENS, 0)
        firsts = [(await self.stream(2, 0)).first_token_s for _ in range(NUM_FIRST_TOKENS)]
        return Figures(
            1e6 * cpu / count,
            1e6 * (cpu - idle_rate * seconds) / count,
            NUM_STREAMS * UNPACED_TOKENS / unpaced_s,
            1e3 * statistics.median(firsts),
        )


def process_table() -> dict[int, tuple[int, float]]:
    """pid -> (parent, CPU seconds)."""
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            table[int(stat.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK_S)
    return table


def children_of(pid: int) -> list[int]:
    return [child for child, (parent, _) in process_table().items() if parent == pid]


def make_tokenizer(path: Path) -> None:
    """One token a byte: the ingress needs one, and nothing else of a model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@contextlib.contextmanager
def running(kind: str, model: Path) -> Iterator[Gateway]:
    gateway = Gateway(kind, model)
    try:
        yield gateway
    finally:
        gateway.stop()


def measure(kind: str, model: Path, rounds: int) -> list[Figures]:
    async def main(gateway: Gateway) -> list[Figures]:
        await gateway.streams(16, 0)  # warm-up
        return [await gateway.measure() for _ in range(rounds)]

    with running(kind, model) as gateway:
        return asyncio.run(main(gateway))


def median(rounds: list[Figures]) -> Figures:
    values = [asdict(one) for one in rounds]
    return Figures(**{name: statistics.median(one[name] for one in values) for name in values[0]})


def ratios(figures: dict[str, Figures]) -> dict[str, dict[str, float]]:
    plain, default = figures["uvicorn"], figures["serve-default"]
    return {
        kind: {
            "CPU a token, times uvicorn's": one.cpu_us_per_token / plain.cpu_us_per_token,
            "the same without idle CPU": one.busy_cpu_us_per_token / plain.busy_cpu_us_per_token,
            "unpaced tokens/s, times Serve's as it comes": one.unpaced_tokens_per_s
            / default.unpaced_tokens_per_s,
            "first token, ms above uvicorn's": one.first_token_ms - plain.first_token_ms,
        }
        for kind, one in figures.items()
    }


def claims(of: dict[str, dict[str, float]]) -> list[str]:
    """Those that do not hold."""
    ours = of["haproxy"]
    limits = {
        "CPU a token, times uvicorn's": (float("-inf"), 8.0),
        "unpaced tokens/s, times Serve's as it comes": (12.0, float("inf")),
        "first token, ms above uvicorn's": (float("-inf"), 10.0),
    }
    return [
        f"{name}: {ours[name]:.1f}, not within {low:g} and {high:g}"
        for name, (low, high) in limits.items()
        if not low <= ours[name] <= high
    ]


def table(figures: dict[str, Figures], of: dict[str, dict[str, float]]) -> str:
    names = list(of["uvicorn"])
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(f'{of[kind][name]:.1f}' for name in names)} |" for kind in figures]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        make_tokenizer(model)
        measured: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
        # uvicorn, which all are compared with, once more at the end: other work comes and goes on a machine
        for kind in (*KINDS, "uvicorn"):
            measured[kind] += measure(kind, model, options.rounds)
            print(kind, median(measured[kind]), flush=True)
    figures = {kind: median(rounds) for kind, rounds in measured.items()}
    of = ratios(figures)
    missed = claims(of)
    data: dict[str, Any] = {
        "command": "python -m load_tests.gateway_bench",
        "conditions": {
            **machine(),
            "rounds": options.rounds,
            "versions": {name: version(name) for name in ("ray", "fastapi", "uvicorn")},
        },
        "figures": {kind: asdict(one) for kind, one in figures.items()},
        "ratios": of,
        "missed": missed,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gateway.json").write_text(json.dumps(data, indent=1) + "\n")
    title = f"""# The way from HTTP to the engine

`{data["command"]}`: see its docstring. {options.rounds} rounds on {len(os.sched_getaffinity(0))} cores."""
    (options.out / "gateway.md").write_text(f"{title}\n\n{table(figures, of)}\n")
    print(table(figures, of))
    for miss in missed:
        print("missed:", miss)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
