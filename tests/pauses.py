"""How long the other threads of this process, or the other tasks of an event loop, could not go on.

The longest pause, as a part of the time that some work took. Of three runs the calmest: what else the machine
and the garbage collector do makes pauses too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

TICK_S = 0.002
NUM_RUNS = 3


def longest_pause_of_threads(work: Callable[[], object]) -> float:
    return min(_of_threads(work) for _ in range(NUM_RUNS))


async def longest_pause_of_tasks(work: Callable[[], Awaitable[object]]) -> float:
    return min([await _of_tasks(work) for _ in range(NUM_RUNS)])


def _of_threads(work: Callable[[], object]) -> float:
    pauses = [0.0]
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            is_over.wait(TICK_S)
            pauses.append(time.monotonic() - began)

    thread = threading.Thread(target=run)
    thread.start()
    began = time.monotonic()
    try:
        work()
        took_s = time.monotonic() - began
    finally:
        is_over.set()
        thread.join()
    return _part(pauses, took_s)


async def _of_tasks(work: Callable[[], Awaitable[object]]) -> float:
    pauses = [0.0]
    is_over = asyncio.Event()

    async def run() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            pauses.append(time.monotonic() - began)

    task = asyncio.create_task(run())
    await asyncio.sleep(0)  # it waits now
    began = time.monotonic()
    try:
        await work()
        took_s = time.monotonic() - began
    finally:
        is_over.set()
        await task
    return _part(pauses, took_s)


def _part(pauses: list[float], took_s: float) -> float:
    assert took_s > 10 * TICK_S, "too short to tell"
    return max(pauses) / took_s
