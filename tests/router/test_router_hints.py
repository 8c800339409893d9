"""The real router tells replicas of requests that wait in it; what becomes of a hint is nobody's concern."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest

from router.hint_calls import MAX_UNDER_WAY
from router.residency_router import BASE_ID, ResidencyRouter
from tests.router.test_residency_router import StubReplica, build, finish, report, request, route, run


class Told(StubReplica):
    """Accepts two requests."""

    def __init__(self, name: str, failure: Exception | None = None, **stats: Any) -> None:
        super().__init__(name, max_ongoing=2, **stats)
        self.hints: list[str] = []
        self.failure = failure
        self.hangs = asyncio.Event()  # while it is not set
        self.hangs.set()

    def try_send_request(self, call: PendingRequest, with_rejection: bool) -> Told:
        assert not with_rejection
        assert call.metadata.call_method == "prefetch"
        self.hints.append(call.args[0]["name"])
        if isinstance(self.failure, ConnectionError):  # the actor is dead: Ray raises at once
            raise self.failure
        return self

    async def get_async(self) -> None:
        await self.hangs.wait()
        if self.failure is not None:
            raise self.failure


def ask(router: ResidencyRouter, adapter: str) -> asyncio.Task[str]:
    pending = request(adapter, route="")
    ref = {"name": adapter, "uri": "x", "version": "1"}
    pending.args = [{"prompt_token_ids": [1, 2], "adapter": None if adapter == BASE_ID else ref}]
    return asyncio.create_task(route(router, pending))


async def full(replica: Told) -> ResidencyRouter:
    router = build(replica)
    for _ in range(2):
        await route(router, request(BASE_ID))
    return router


async def let_all_in(router: ResidencyRouter, replica: Told, calls: list[asyncio.Task[str]]) -> None:
    left = set(calls)
    while left:
        finish(router, replica)
        done, left = await asyncio.wait(left, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert {call.result() for call in done} == {replica.replica_id.unique_id}


def test_who_waits_has_its_replica_told_once() -> None:
    async def main() -> None:
        replica = Told("a", resident=["warm"])
        router = await full(replica)
        calls = [ask(router, name) for name in ("sql", "sql", BASE_ID, "warm", "sql", "law")]
        await asyncio.sleep(0.2)  # and router looks at who waits
        assert replica.hints == ["sql", "law"]
        await let_all_in(router, replica, calls)
        assert replica.hints == ["sql", "law"]

    run(main())


def test_who_need_not_wait_has_nobody_told() -> None:
    async def main() -> None:
        replica = Told("a")
        router = build(replica)
        assert [await ask(router, name) for name in ("sql", "law")] == ["a", "a"]
        assert replica.hints == []

    run(main())


def test_who_waits_for_one_replica_while_others_have_places_has_it_told() -> None:
    async def main() -> None:
        warm, other = Told("warm", host=["sql"], running=2), Told("other", running=1, free_slots=0)
        router = build(warm, other)
        call = ask(router, "sql")
        await asyncio.sleep(0.05)
        assert not call.done()
        assert (warm.hints, other.hints) == (["sql"], [])
        warm.routing_stats = {**warm.routing_stats, "running": 1}
        report(router, warm, other)
        assert await call == "warm"

    run(main())


@pytest.mark.parametrize("failure", [ConnectionError("dead"), ValueError("no such adapter"), TimeoutError()])
def test_a_hint_that_fails_harms_no_request(failure: Exception) -> None:
    async def main() -> None:
        replica = Told("a", failure)
        router = await full(replica)
        calls = [ask(router, "sql"), ask(router, "law")]
        await asyncio.sleep(0.01)
        assert replica.hints == ["sql", "law"]
        await let_all_in(router, replica, calls)
        assert router._hint_calls._under_way == set()

    run(main())


def test_the_log_of_a_hint_that_fails_tells_nothing_of_where_adapters_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")

    async def main() -> None:
        replica = Told("a", ValueError("s3://key:secret@bucket/sql"))
        router = await full(replica)
        calls = [ask(router, "sql")]
        await asyncio.sleep(0.01)
        await let_all_in(router, replica, calls)

    run(main())
    assert "hint to a: ValueError" in caplog.text
    assert "secret" not in caplog.text


def test_replicas_that_hang_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hints are given up, and bounded meanwhile."""
    monkeypatch.setattr("router.hint_calls.HINT_S", 0.1)

    async def main() -> None:
        replica = Told("a")
        replica.hangs.clear()
        router = await full(replica)
        call = ask(router, "sql")
        await asyncio.sleep(0.01)
        for _ in range(2 * MAX_UNDER_WAY):
            router._hint_calls.send(replica, {"name": "more"})
        assert len(router._hint_calls._under_way) == MAX_UNDER_WAY
        await let_all_in(router, replica, [call])
        async with asyncio.timeout(2):
            while router._hint_calls._under_way:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(main())


def test_who_is_refused_has_nobody_told() -> None:
    async def main() -> None:
        replica = Told("a")
        router = await full(replica)
        waiting = ask(router, "sql")
        await asyncio.sleep(0.01)
        router._busy_since -= 60.0
        with pytest.raises(BackPressureError):
            await ask(router, "law")
        assert replica.hints == ["sql"]
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(main())


def test_a_replica_that_stops_is_not_told() -> None:
    async def main() -> None:
        replica = Told("a")
        router = await full(replica)
        report(router)  # it is no longer among those that run
        calls = [ask(router, name) for name in ("sql", "law")]
        await asyncio.sleep(0.1)
        assert replica.hints == []
        successor = Told("b")
        report(router, successor)
        assert await asyncio.gather(*calls) == ["b", "b"]

    run(main())
