"""A response of server-sent events, from a stream of deltas and a writer that turns them into chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.delta_stream import Batch, DeltaStream
from deployments.api.disconnect import unless_disconnected
from deployments.api.http_errors import internal_error_body
from engine.errors import LorafleetError

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


class ChunkWriter(Protocol):
    """Events of one response. `write` may return nothing, when there is nothing to show yet."""

    def opening(self) -> bytes: ...

    def write(self, batch: Batch) -> bytes: ...

    def closing(self) -> bytes: ...


class SseResponse(Response):
    """Made by `start`. Closes its deltas, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, deltas: DeltaStream, writer: ChunkWriter) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._deltas = deltas
        self._writer = writer

    @classmethod
    async def start(cls, deltas: DeltaStream, writer: ChunkWriter) -> SseResponse:
        """Waits for the first output, so that an error before it keeps its HTTP status."""
        try:
            await deltas.pull_first()
        except BaseException:
            await deltas.aclose()
            raise
        return cls(deltas, writer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await unless_disconnected(receive, self._send(send))
        finally:
            await self._deltas.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncGenerator[bytes]:
        """Ends with [DONE] or, if the request failed, with an error event and no [DONE]."""
        try:
            yield self._writer.opening()
            async for batch in self._deltas:
                if chunk := self._writer.write(batch):
                    yield chunk
            yield self._writer.closing()
        except LorafleetError as error:
            yield event({"error": error.body()})
        except Exception:
            log.exception("a stream failed")
            yield event(internal_error_body())
