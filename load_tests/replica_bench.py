"""CPU that a replica's process takes for each token: from its engine's frames to the chunks that it sends.

    python -m load_tests.replica_bench

256 streams without an engine: frames with a token for each stream, as fast as they are taken; text by a
tokenizer of bytes; chunks as a replica makes them. Left out: reading the socket, and Ray Serve behind.
Fastest of five rounds, microseconds of one core.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from deployments.wire import encode_deltas
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.events import TokenEvent
from engine.request import GenerateRequest
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.wire import encode_event
from tests.tiny import byte_tokenizer

NUM_STREAMS, NUM_TOKENS, ROUNDS, INTERVAL_S = 256, 400, 5, 0.04


async def measure(params: SamplingParams) -> float:
    client: Any = EngineClient(EngineConfig(model="none"))
    client._writer = SimpleNamespace(write=lambda data: None)
    client.tokenizer = Tokenizer(byte_tokenizer())
    streams = [asyncio.create_task(_consume(client, str(i), params)) for i in range(NUM_STREAMS)]
    await asyncio.sleep(0)  # each begins
    assert len(client._streams) == NUM_STREAMS
    frames = [
        json.dumps({"events": [encode_event(_token(name, number)) for name in client._streams]})
        for number in range(1, NUM_TOKENS + 1)
    ]
    began = time.process_time()
    for frame in frames:
        client._dispatch(json.loads(frame))
        await asyncio.sleep(0)  # as between two reads of a socket
    assert await asyncio.gather(*streams) == [NUM_TOKENS] * NUM_STREAMS
    return (time.process_time() - began) / (NUM_STREAMS * NUM_TOKENS) * 1e6


def _token(name: str, number: int) -> TokenEvent:
    return TokenEvent(name, 97 + number % 26, finish_reason="length" if number == NUM_TOKENS else None)


async def _consume(client: EngineClient, name: str, params: SamplingParams) -> int:
    num_tokens = 0
    request = GenerateRequest(name, (1, 2, 3), params, None)
    async with aclosing(client.generate(request, INTERVAL_S)) as pieces:
        async for deltas in pieces:
            encode_deltas(deltas)
            num_tokens = deltas[-1].num_output_tokens
    return num_tokens


def main() -> int:
    stops: dict[str, tuple[str, ...]] = {"no stop strings": (), "two stop strings": ("</end>", "\n\n")}
    for name, stop in stops.items():
        params = SamplingParams(max_tokens=NUM_TOKENS, stop=stop)
        us = min(asyncio.run(measure(params)) for _ in range(ROUNDS))
        sys.stdout.write(f"{name}: {us:.1f} us a token\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
