"""Work that takes longer for a larger request: done at once if that is short, else in a thread.

Other requests go on meanwhile as far as the work lets go of the GIL. Python code does, every 5 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

THREAD_CHARS = 16_384  # characters or tokens of one request; to convert more would hold up other streams

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`size`: characters or tokens of all that it is done for."""
    return work() if size <= THREAD_CHARS else await asyncio.to_thread(work)
