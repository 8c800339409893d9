"""Callers share one call, its result, its error, and nothing else."""

from __future__ import annotations

import asyncio
import gc

import pytest

from router.shared_calls import SharedCalls

pytestmark = pytest.mark.anyio


class Work:
    def __init__(self) -> None:
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_calls += 1
        number = self.num_calls
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_callers_of_one_key_share_a_call_and_the_next_one_makes_another() -> None:
    work, calls = Work(), SharedCalls[str, int]()
    waiting = [asyncio.create_task(calls.get(key, work)) for key in "aaba"]
    await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*waiting) == [1, 1, 2, 1]
    assert await calls.get("a", work) == 3


async def test_a_caller_who_leaves_takes_nothing_from_the_others() -> None:
    work, calls = Work(), SharedCalls[str, int]()
    first, second = (asyncio.create_task(calls.get("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    work.gate.set()
    assert await second == 1
    assert first.cancelled()


async def test_an_error_reaches_all_of_them_and_is_nobodys_later() -> None:
    work, calls = Work(), SharedCalls[str, int]()
    work.error = ValueError("no")
    waiting = [asyncio.create_task(calls.get("a", work)) for _ in range(2)]
    await asyncio.sleep(0)
    work.gate.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert answers == [work.error] * 2
    work.error = None
    assert await calls.get("a", work) == 2


async def test_an_error_that_nobody_waits_for_is_not_complained_of() -> None:
    """asyncio would log it as never retrieved."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    work, calls = Work(), SharedCalls[str, int]()
    work.error = ValueError("no")
    alone = asyncio.create_task(calls.get("a", work))
    await asyncio.sleep(0)
    alone.cancel()
    work.gate.set()
    await asyncio.gather(alone, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []
