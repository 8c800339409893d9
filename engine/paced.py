"""A stream in few, larger pieces: what was put since the last one was taken. For one event loop.

Putting costs no turn of the loop: to wake whoever takes for each token took about as long as all else that a
token needs. The first piece goes at once, and so does the end; in between there are `interval_s` at least.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

T = TypeVar("T")


class Paced(Generic[T]):
    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._items: list[T] = []
        self._has_ended = False
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None  # of whoever takes
        self._wakes_at_end_only = False

    def put(self, item: T) -> None:
        self._items.append(item)
        if not self._wakes_at_end_only:
            self._wake_up()

    def end(self, error: Exception | None = None) -> None:
        """`error` is raised after all that came before it. A second end is nothing."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._wake_up()

    async def pieces(self) -> AsyncGenerator[list[T]]:
        """None of them is empty."""
        while True:
            if not self._items and not self._has_ended:
                await self._sleep()
            if self._items:
                items, self._items = self._items, []
                yield items
            if self._has_ended and not self._items:
                break
            if self._interval_s and not self._has_ended:
                await self._pause()
        if self._error is not None:
            raise self._error

    async def _pause(self) -> None:
        timer = asyncio.get_running_loop().call_later(self._interval_s, self._wake_up)
        self._wakes_at_end_only = True
        try:
            await self._sleep()
        finally:
            self._wakes_at_end_only = False
            timer.cancel()

    async def _sleep(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
