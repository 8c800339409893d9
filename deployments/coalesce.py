"""Fewer, larger chunks of a stream. Knows nothing of what it carries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def coalesce(source: AsyncGenerator[list[T], None], interval_s: float) -> AsyncGenerator[list[T], None]:
    """Sends what has arrived since the last send: the first and the last at once, else every `interval_s`.

    Each send costs a message between processes, whatever it holds. Closing it closes the source, and an
    error of the source is raised after everything that came before it.
    """
    pending: list[T] = []
    arrived = asyncio.Event()

    async def pump() -> None:
        try:
            async with aclosing(source):
                async for items in source:
                    pending.extend(items)
                    arrived.set()
        finally:
            arrived.set()

    task = asyncio.create_task(pump())
    try:
        while not task.done():
            await arrived.wait()
            arrived.clear()
            if pending:
                items, pending = pending, []
                yield items
            await asyncio.wait((task,), timeout=interval_s)
        if pending:
            yield pending
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
