"""One HTTP exchange, driven by hand: the test sees each piece when it is sent and can hang up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import FastAPI
from starlette.types import Message


class Exchange:
    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Message] = []
        self._body = json.dumps(body).encode()
        self._requested = False
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "headers": [(b"content-type", b"application/json")], "server": ("fleet", 80),
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def pieces(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body" and m["body"]]

    async def has_sent(self, num_pieces: int) -> None:
        async with asyncio.timeout(5):
            while len(self.pieces) < num_pieces:
                self._news.clear()
                await self._news.wait()

    async def hang_up(self) -> None:
        """Returns when the application has ended its work."""
        self._gone.set()
        async with asyncio.timeout(5):
            await self.task

    async def _receive(self) -> Message:
        if not self._requested:
            self._requested = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.set()
