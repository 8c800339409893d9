"""Sends planned requests to a server when they are due, and writes down what came back and when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from load_tests.harness.workload import Planned

CUT_OFF = "cut_off"  # a stream without an end
NO_ANSWER = "no_answer"


@dataclass(slots=True)
class Record:
    """Times are seconds since the run began."""

    planned: float
    adapter: str
    group: str
    num_prompt: int
    sent: float = 0.0
    first: float | None = None  # token
    last: float | None = None
    num_output: int = 0
    error: str | None = None  # the server's code, an HTTP status, CUT_OFF or NO_ANSWER

    @property
    def ttft_s(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def tpot_s(self) -> float | None:
        if self.first is None or self.last is None or self.num_output < 2:
            return None
        return (self.last - self.first) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.last is None else self.last - self.sent


@dataclass(frozen=True, slots=True)
class Target:
    url: str  # without /v1
    adapters: tuple[str, ...]  # by number, as the plan has them
    api_key: str | None = None
    timeout_s: float = 120.0
    extra: dict[str, Any] = field(default_factory=lambda: {"ignore_eos": True})  # in every request

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


async def run(
    target: Target, planned: Sequence[Planned], on_end: Callable[[Record], None] = lambda _: None
) -> list[Record]:
    """In the order of the plan. Returns when the last one has ended."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=target.headers, timeout=timeout, connector=connector) as session:
        began = time.perf_counter()

        async def one(request: Planned) -> Record:
            await asyncio.sleep(max(0.0, request.time_s - (time.perf_counter() - began)))
            name = target.adapters[request.adapter]
            record = Record(request.time_s, name, request.group, len(request.prompt))
            await _send(session, target, request, record, began)
            on_end(record)
            return record

        return await asyncio.gather(*(one(request) for request in planned))


async def _send(
    session: aiohttp.ClientSession, target: Target, request: Planned, record: Record, began: float
) -> None:
    body = {
        "model": record.adapter,
        "prompt": list(request.prompt),
        "max_tokens": request.num_output,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    record.sent = time.perf_counter() - began
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                record.error = _code(await answer.text(), answer.status)
                return
            record.error = CUT_OFF  # until its end comes
            async for line in answer.content:
                _take(line, record, time.perf_counter() - began)
    except (aiohttp.ClientError, TimeoutError):
        record.error = record.error or NO_ANSWER


def _take(line: bytes, record: Record, now: float) -> None:
    """A line of a stream of events; some servers keep it alive by comments, or name events."""
    if not line.startswith(b"data:"):
        return
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        record.error = None
        return
    event = json.loads(data)
    if "error" in event:
        record.error = _code(data.decode(), 200)
        return
    if event["choices"]:
        record.first = now if record.first is None else record.first
        record.last = now
    if event.get("usage"):
        record.num_output = event["usage"]["completion_tokens"]


def _code(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return str(status)
