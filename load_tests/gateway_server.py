"""The servers that `gateway_bench` compares; each streams a word a token and computes nothing.

    python -m load_tests.gateway_server KIND PORT MODEL_DIR

KIND: `uvicorn` (FastAPI alone), `serve-default` (our application on Ray Serve as it comes: its Python proxy,
no switches, a chunk for each token), `python` and `haproxy` (as `lorafleet serve` starts them). A request's
`seed` is the time between two tokens in microseconds. Prints a line when it serves; ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from engine.config import EngineConfig
from engine.paced import Paced
from engine.request import GenerateRequest, OutputDelta

KINDS = ("uvicorn", "serve-default", "python", "haproxy")
WORD = " word"
MAX_MODEL_LEN = 8192


async def ticks(count: int, interval_us: int) -> AsyncGenerator[int, None]:
    """Numbers from 1, each when its token is due. At no interval others get their turn between them."""
    started = time.monotonic()
    for number in range(1, count + 1):
        due = started + number * interval_us / 1e6
        await asyncio.sleep(max(0.0, due - time.monotonic()) if interval_us else 0)
        yield number


class FakeEngineClient:
    """An EngineClient without an engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.facts = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        self.is_alive = True

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait_for_death(self) -> None:
        await asyncio.Event().wait()

    async def stats(self) -> dict[str, Any]:
        return {}

    async def generate(
        self, request: GenerateRequest, interval_s: float = 0.0
    ) -> AsyncGenerator[list[OutputDelta], None]:
        deltas = Paced[OutputDelta](interval_s)
        source = asyncio.create_task(_put_tokens(deltas, request))
        try:
            async with aclosing(deltas.pieces()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            source.cancel()


async def _put_tokens(deltas: Paced[OutputDelta], request: GenerateRequest) -> None:
    total = request.params.max_tokens or 1
    async for number in ticks(total, request.params.seed or 0):
        deltas.put(
            OutputDelta(
                index=0,
                text=WORD,
                token_ids=(1,),
                logprobs=None,
                finish_reason="length" if number == total else None,
                stop_reason=None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_cached_tokens=0,
                num_output_tokens=number,
            )
        )
    deltas.end()


def run_uvicorn(port: int) -> None:
    import uvicorn

    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": body["model"]}

        async def events() -> AsyncGenerator[bytes, None]:
            async for _ in ticks(body["max_tokens"], body.get("seed", 0)):
                chunk = {**head, "choices": [{"index": 0, "text": WORD, "finish_reason": None}]}
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print("serving", flush=True)

    Server(uvicorn.Config(app, port=port, access_log=False)).run()


def run_serve(kind: str, port: int, model: str) -> None:
    from deployments.config import AppArgs
    from deployments.launch import Listen, environment

    listen = Listen(port=port, proxy="haproxy" if kind == "haproxy" else "python")
    if kind == "serve-default":
        os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "0"
    os.environ.update(environment(listen, os.environ))
    import ray
    from ray import serve

    from deployments.app import application

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
    )
    serve.start(http_options={"host": listen.host, "port": listen.port})
    args = AppArgs(model=model, served_model_name=["base"], engine={"max_num_seqs": 64})
    if kind == "serve-default":
        args = args.model_copy(update={"stream_interval_s": 0.0})
    serve.run(application(args, "load_tests.gateway_server:FakeEngineClient"))
    print("serving", flush=True)
    sys.stdin.buffer.read()
    serve.shutdown()
    ray.shutdown()


def main() -> None:
    kind, port, model = sys.argv[1:]
    if kind == "uvicorn":
        run_uvicorn(int(port))
    else:
        run_serve(kind, int(port), model)


if __name__ == "__main__":
    main()
