"""A TCP link to a server that can be made slow or cut: what an S3 behind a bad network looks like."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, Self

CHUNK_BYTES = 4096


class FaultyLink:
    """A context manager; forwards in a thread of its own. Change `delay_s` and `is_cut` at any time."""

    def __init__(self, target_port: int) -> None:
        self.delay_s = 0.0  # of each chunk, both ways
        self.is_cut = False  # connections end at once
        self.port = 0
        self._target_port = target_port
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._is_ready.set()
            await self._stop.wait()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            if not self.is_cut:
                there, back = await asyncio.open_connection("127.0.0.1", self._target_port)
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        except OSError:
            pass  # one side went away: so does the other
        finally:
            del self._connections[task]
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (chunk := await reader.read(CHUNK_BYTES)) and not self.is_cut:
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(chunk)
                await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
