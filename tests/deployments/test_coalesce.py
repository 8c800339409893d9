"""Coalescing keeps every item, its order and the stream's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import pytest

from deployments.coalesce import coalesce


async def numbers(
    count: int, delay_s: float = 0.0, fail: bool = False, log: list[str] | None = None
) -> AsyncGenerator[list[int], None]:
    try:
        for i in range(count):
            await asyncio.sleep(delay_s)
            yield [i]
        if fail:
            raise RuntimeError("broken")
    finally:
        if log is not None:
            log.append("closed")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


async def collect(source: AsyncIterator[list[int]]) -> list[list[int]]:
    return [chunk async for chunk in source]


@pytest.mark.parametrize("interval_s", [0.0, 0.02, 10.0])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_nothing_is_lost_or_reordered(count: int, interval_s: float) -> None:
    async def main() -> None:
        chunks = await asyncio.wait_for(collect(coalesce(numbers(count), interval_s)), timeout=5)
        assert [i for chunk in chunks for i in chunk] == list(range(count))
        assert all(chunks)

    run(main())


def test_the_first_item_goes_at_once_and_the_rest_in_few_chunks() -> None:
    async def main() -> None:
        chunks = await collect(coalesce(numbers(40, delay_s=0.002), interval_s=0.04))
        assert chunks[0] == [0]
        assert len(chunks) < 12

    run(main())


def test_the_end_does_not_wait_for_the_interval() -> None:
    async def main() -> None:
        await asyncio.wait_for(collect(coalesce(numbers(3, delay_s=0.001), interval_s=60)), timeout=5)

    run(main())


def test_an_error_comes_after_the_items_before_it() -> None:
    async def main() -> None:
        seen: list[int] = []

        async def consume() -> None:
            async for chunk in coalesce(numbers(5, fail=True), interval_s=0.01):
                seen.extend(chunk)

        with pytest.raises(RuntimeError, match="broken"):
            await consume()
        assert seen == [0, 1, 2, 3, 4]

    run(main())


def test_closing_it_closes_the_source() -> None:
    """FR-56: a cancelled request must not run on."""

    async def main() -> None:
        log: list[str] = []
        stream = coalesce(numbers(1000, delay_s=0.001, log=log), interval_s=0.01)
        await anext(stream)
        await stream.aclose()
        assert log == ["closed"]

    run(main())


def test_cancelling_the_consumer_closes_the_source() -> None:
    """FR-56."""

    async def main() -> None:
        log: list[str] = []
        task = asyncio.create_task(collect(coalesce(numbers(1000, delay_s=0.01, log=log), interval_s=0.01)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert log == ["closed"]

    run(main())
