from __future__ import annotations

import asyncio

import pytest

from router.limited_calls import LimitedCalls
from tests.router.catalog_fakes import run


class Calls:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates = {name: asyncio.Event() for name in "abcdef"}

    async def __call__(self, name: str) -> None:
        self.begun.append(name)
        await self.gates[name].wait()

    async def let_end(self, *names: str) -> None:
        for name in names:
            self.gates[name].set()
        await asyncio.sleep(0.01)


def test_others_go_on_while_one_is_slow_and_never_more_than_the_limit() -> None:
    async def main() -> None:
        limited, calls = LimitedCalls[str](2), Calls()
        first = asyncio.create_task(limited.run("abc", calls))
        await asyncio.sleep(0)
        await limited.run("abc", calls)  # there is no room
        await calls.let_end("b")
        assert calls.begun == ["a", "b"]
        assert not first.done()
        second = asyncio.create_task(limited.run("acd", calls))
        await calls.let_end("c")
        assert calls.begun == ["a", "b", "c"], "a is under way"
        assert second.done()
        await calls.let_end("a", "d")
        assert first.done()
        await limited.run("ad", calls)
        assert calls.begun == ["a", "b", "c", "a", "d"]

    run(main)


def test_one_that_fails_or_is_cancelled_leaves_its_place() -> None:
    async def fail(name: str) -> None:
        raise ValueError(name)

    async def main() -> None:
        limited, calls = LimitedCalls[str](1), Calls()
        with pytest.raises(ExceptionGroup):
            await limited.run("a", fail)
        cancelled = asyncio.create_task(limited.run("a", calls))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await calls.let_end("a")
        await limited.run("a", calls)
        assert calls.begun == ["a", "a"]

    run(main)
