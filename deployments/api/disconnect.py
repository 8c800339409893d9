"""Work that ends when its client leaves. Knows ASGI's receive channel, nothing of what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Raises ClientDisconnect if the client leaves first. `work` is over when this returns or raises.

    Plain tasks and not a cancel scope: a scope would cancel every await of the work's own clean-up again.
    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
