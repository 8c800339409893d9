"""Pacing keeps every item, its order and the stream's end."""

from __future__ import annotations

import asyncio

import pytest

from engine.paced import Paced

pytestmark = pytest.mark.anyio


async def numbers(
    paced: Paced[int], count: int, delay_s: float = 0.0, error: Exception | None = None
) -> None:
    for i in range(count):
        await asyncio.sleep(delay_s)
        paced.put(i)
    paced.end(error)


async def collect(paced: Paced[int], source: asyncio.Task[None]) -> list[list[int]]:
    async with asyncio.timeout(5):
        pieces = [piece async for piece in paced.pieces()]
    await source
    return pieces


@pytest.mark.parametrize("interval_s", [0.0, 0.02, 10.0])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
async def test_nothing_is_lost_or_reordered(count: int, interval_s: float) -> None:
    paced = Paced[int](interval_s)
    pieces = await collect(paced, asyncio.create_task(numbers(paced, count)))
    assert [i for piece in pieces for i in piece] == list(range(count))
    assert all(pieces)


async def test_without_an_interval_each_item_goes_as_it_comes() -> None:
    paced = Paced[int](0.0)
    assert len(await collect(paced, asyncio.create_task(numbers(paced, 20, delay_s=0.001)))) == 20


async def test_the_first_item_goes_at_once_and_the_rest_in_few_pieces() -> None:
    paced = Paced[int](0.04)
    pieces = await collect(paced, asyncio.create_task(numbers(paced, 40, delay_s=0.002)))
    assert pieces[0] == [0]
    assert len(pieces) < 12


async def test_what_comes_after_the_interval_goes_at_once() -> None:
    paced = Paced[int](0.01)
    stream = paced.pieces()
    paced.put(0)
    assert await anext(stream) == [0]
    later = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.05)
    assert not later.done()
    paced.put(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert later.done()


async def test_the_end_does_not_wait_for_the_interval() -> None:
    paced = Paced[int](60)
    assert await collect(paced, asyncio.create_task(numbers(paced, 3, delay_s=0.001))) == [[0], [1, 2]]


async def test_an_error_comes_after_the_items_before_it() -> None:
    paced = Paced[int](0.01)
    source = asyncio.create_task(numbers(paced, 5, error=RuntimeError("broken")))
    seen: list[int] = []

    async def take() -> None:
        async for piece in paced.pieces():
            seen.extend(piece)

    with pytest.raises(RuntimeError, match="broken"):
        await take()
    assert seen == [0, 1, 2, 3, 4]
    await source


async def test_who_takes_may_leave_and_who_puts_does_not_notice() -> None:
    paced = Paced[int](0.01)
    taking = asyncio.create_task(anext(paced.pieces()))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    paced.put(1)
    paced.end()
