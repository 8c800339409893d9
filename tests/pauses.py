"""How long the other threads of this process, or the other tasks of an event loop, could not go on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

TICK_S = 0.002


@dataclass(slots=True)
class Pauses:
    """Whole when their block has ended."""

    longest_s: float = 0.0

    def see(self, began: float) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - began)


@contextmanager
def pauses_of_threads() -> Iterator[Pauses]:
    pauses = Pauses()
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            is_over.wait(TICK_S)
            pauses.see(began)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield pauses
    finally:
        is_over.set()
        thread.join()


@asynccontextmanager
async def pauses_of_tasks() -> AsyncIterator[Pauses]:
    pauses = Pauses()
    is_over = asyncio.Event()

    async def run() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            pauses.see(began)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)  # it waits now
    try:
        yield pauses
    finally:
        is_over.set()
        await task
