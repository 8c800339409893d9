"""Where requests wait in the router: adapters take turns, and who gives up leaves nothing behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from ray.serve.exceptions import BackPressureError

from router.residency_router import ResidencyRouter
from tests.router.test_residency_router import StubReplica, build, finish, request, route, run

QUIET = "quiet"


def full_fleet() -> tuple[ResidencyRouter, StubReplica]:
    """One replica that accepts two, and has them."""
    replica = StubReplica("a", max_ongoing=2, resident=["noisy", QUIET], running=0)
    return build(replica), replica


async def fill(router: ResidencyRouter) -> None:
    for _ in range(2):
        await route(router, request("noisy"))


def test_a_quiet_adapter_waits_for_one_round_behind_a_noisy_one() -> None:
    """FR-32."""

    async def main() -> None:
        router, replica = full_fleet()
        await fill(router)
        ended: list[str] = []

        async def ask(adapter: str) -> None:
            await route(router, request(adapter))
            ended.append(adapter)

        calls = [asyncio.create_task(ask("noisy")) for _ in range(30)]
        await asyncio.sleep(0.01)
        calls.append(asyncio.create_task(ask(QUIET)))
        await asyncio.sleep(0.01)
        for _ in range(31):
            finish(router, replica)
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls)
        assert ended.index(QUIET) <= 1
        assert (len(router._turns), router._entering) == (0, set())

    run(main())


def test_who_gives_up_in_the_queue_or_at_the_door_leaves_nothing() -> None:
    async def main() -> None:
        router, replica = full_fleet()
        await fill(router)
        calls = [asyncio.create_task(route(router, request(f"a{i % 5}"))) for i in range(20)]
        await asyncio.sleep(0.01)
        for call in calls[::2]:
            call.cancel()
        finish(router, replica)  # lets one in, in the same turn of the event loop
        for call in calls[1::4]:
            call.cancel()
        for _ in range(20):
            finish(router, replica)
            await asyncio.sleep(0.005)
        for call in calls:
            with suppress(asyncio.CancelledError):
                await call
        assert (len(router._turns), router._entering) == (0, set())
        assert not router._pending_requests_to_fulfill or all(
            pending.future.done() for pending in router._pending_requests_to_fulfill
        )
        await route(router, request("next"))

    run(main())


def test_what_others_leave_is_found_without_news() -> None:
    """An answer said that the replica is full; the report, which has not changed since, says it is not."""

    async def main() -> None:
        router, replica = full_fleet()
        router.on_new_queue_len_info(replica.replica_id, 2)
        assert await asyncio.wait_for(route(router, request(QUIET)), 3) == "a"

    run(main())


def test_waiting_in_turns_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        router, _ = full_fleet()
        monkeypatch.setattr(router, "_max_wait_s", 0.2)
        await fill(router)
        with pytest.raises(BackPressureError):
            await route(router, request(QUIET))
        assert (len(router._turns), router._entering) == (0, set())

    run(main())
