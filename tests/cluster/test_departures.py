"""FR-56: three hundred streams at once, each left at some point before its twentieth token; ten times over.

Takes a minute or two: `pytest -m slow -s tests/cluster/test_departures.py`. CI has sixty in `test_serve.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from string import ascii_lowercase
from urllib.parse import urlsplit

import pytest

from tests.cluster.serve_process import ServeProcess, serving
from tests.tiny import make_adapter, make_parrot

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_STREAMS, NUM_ROUNDS, NUM_TOKENS = 300, 10, 8000
SEATS, NUM_REPLICAS = 64, 2
WITHIN_S = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    root = tmp_path_factory.mktemp("departures")
    base = make_parrot(root / "base", ascii_lowercase.encode(), max_position_embeddings=2 * NUM_TOKENS)
    named = make_adapter(base, root / "named", rank=4, targets=["q_proj"], seed=0)
    flags = [
        "--model", str(base), "--lora-modules", f"named={named}", "--num-replicas", str(NUM_REPLICAS),
        "--max-num-seqs", str(SEATS), "--pool-bytes", "32000000", "--proxy", "python",
    ]  # fmt: skip
    with serving(flags) as server:
        yield server


async def leave(url: str, model: str, rng: random.Random) -> str:
    """Where it left."""
    body = {"model": model, "prompt": "a", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(head.encode() + content)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            return "before the answer"
        assert b" 200 " in await reader.readline()
        wanted, seen = rng.randint(1, 20), 0
        while seen < wanted:
            line = (await reader.readline()).removeprefix(b"data: ")
            if line.startswith(b"{"):
                seen += len(json.loads(line)["choices"][0]["text"])
        return "in the answer"
    finally:
        writer.transport.abort()


async def one_round(url: str, rng: random.Random) -> Counter[str]:
    places = await asyncio.gather(*(leave(url, ("base", "named")[i % 2], rng) for i in range(NUM_STREAMS)))
    return Counter(places)


def held(server: ServeProcess) -> dict[str, float]:
    """What is not zero of all that a stream can hold."""
    counts: defaultdict[str, float] = defaultdict(float)
    for line in server.call("/metrics").body.splitlines():
        series, _, value = line.rpartition(" ")
        name = series.partition("{")[0].removeprefix("lorafleet_")
        if name in ("requests_running", "requests_waiting", "queued_tokens", "running_tokens") or (
            name in ("adapter_requests_running", "adapter_requests_waiting") or 'owner="kv"' in series
        ):
            counts[name] += float(value)
    assert "requests_running" in counts
    return {name: count for name, count in counts.items() if count}


def test_three_hundred_streams_that_are_left_leave_nothing_behind(server: ServeProcess) -> None:
    rng = random.Random(0)
    took = []
    for _ in range(NUM_ROUNDS):
        places = asyncio.run(one_round(server.url, rng))
        assert len(places) == 2
        left = time.monotonic()
        while still := held(server):
            assert time.monotonic() - left < WITHIN_S, still
            time.sleep(0.05)
        took.append(time.monotonic() - left)
    print(f"nothing held after {', '.join(f'{seconds:.2f}' for seconds in took)} s")  # noqa: T201
    # a replica that still counted them as its own would take fewer than it can
    capacity = NUM_REPLICAS * 2 * SEATS
    with ThreadPoolExecutor(capacity) as threads:
        answers = list(threads.map(lambda _: server.complete("named"), range(capacity)))
    assert Counter(answer.status for answer in answers) == {200: capacity}
