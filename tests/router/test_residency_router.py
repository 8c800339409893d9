"""The real router object with stub replicas: no cluster, no Serve controller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter

from router.residency_router import BASE_ID, ResidencyRouter

DEPLOYMENT = DeploymentID("engine", "app")


class StubReplica:
    def __init__(self, name: str, *, max_ongoing: int = 4, **stats: Any) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.routing_stats = stats
        self.replica_metadata = {"max_num_seqs": 2, "max_adapters": 4}
        self.max_ongoing_requests = max_ongoing
        self.node_id = "node"
        self.multiplexed_model_ids: set[str] = set()
        self.queue_len = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue_len


def request(model_id: str, internal_id: str = "parent", **kwargs: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, multiplexed_model_id=model_id)
    return PendingRequest(args=[], kwargs=kwargs, metadata=metadata)


def build(*replicas: StubReplica) -> ResidencyRouter:
    router = ResidencyRouter(
        DEPLOYMENT,
        DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
        initial_backoff_s=0.001,
        max_backoff_s=0.005,
    )
    router.initialize_state()
    router.update_replicas(list(replicas))
    return router


async def route(router: ResidencyRouter, pending: PendingRequest) -> str:
    replica = await asyncio.wait_for(router._choose_replica_for_request(pending), timeout=5)
    router.on_send_request(replica.replica_id)
    router.on_request_routed(pending, replica.replica_id, None)
    name: str = replica.replica_id.unique_id
    return name


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


def test_the_resident_replica_answers_and_the_reason_travels_with_the_call() -> None:
    async def main() -> None:
        router = build(StubReplica("cold"), StubReplica("warm", resident=["sql"]))
        pending = request("sql", route="")
        assert await route(router, pending) == "warm"
        assert pending.kwargs == {"route": "resident"}

    run(main())


def test_a_call_that_asks_for_no_reason_gets_no_argument() -> None:
    async def main() -> None:
        pending = request("sql")
        await route(build(StubReplica("a")), pending)
        assert pending.kwargs == {}

    run(main())


def test_a_call_without_id_and_a_base_call_are_balanced() -> None:
    async def main() -> None:
        router = build(StubReplica("idle"), StubReplica("busy", running=2, waiting=1))
        await asyncio.sleep(0.01)
        for model_id in ("", BASE_ID):
            pending = request(model_id, route="")
            assert await route(router, pending) == "idle"
            assert pending.kwargs["route"] == "balance"

    run(main())


def test_replicas_that_have_not_reported_yet_can_serve() -> None:
    async def main() -> None:
        replica = StubReplica("new")
        replica.replica_metadata = {}
        assert await route(build(replica), request("sql")) == "new"

    run(main())


def test_eight_calls_inside_one_parent_request_all_get_a_replica() -> None:
    """Serve matches by a request id that these calls share; without care only one of them returns."""

    async def main() -> None:
        router = build(StubReplica("a", max_ongoing=100), StubReplica("b", max_ongoing=100))
        calls = [route(router, request("sql")) for _ in range(8)]
        assert len(await asyncio.gather(*calls)) == 8

    run(main())


@pytest.mark.parametrize("other", ["other", BASE_ID])
def test_queued_requests_get_the_replica_that_was_chosen_for_them(other: str) -> None:
    """Serve hands a replica to the queue's head when it cannot tell the call; the head may be another's."""

    async def main() -> None:
        full = StubReplica("full", max_ongoing=2, resident=["other"], free_slots=0)
        warm = StubReplica("warm", max_ongoing=2, resident=["sql"], free_slots=0)
        full.queue_len = warm.queue_len = 2
        router = build(full, warm)
        await asyncio.sleep(0.01)
        # the head of the queue waits for "full"; the calls of one parent wait for "warm"
        head = asyncio.create_task(route(router, request("other", internal_id="head")))
        await asyncio.sleep(0.01)
        fan_out = [asyncio.create_task(route(router, request("sql", internal_id="p"))) for _ in range(2)]
        await asyncio.sleep(0.01)
        warm.queue_len = 0
        assert await asyncio.gather(*fan_out) == ["warm", "warm"]
        full.queue_len = 0
        assert await head == "full"

    run(main())


def test_a_full_warm_replica_is_waited_for_when_nobody_has_room() -> None:
    async def main() -> None:
        warm = StubReplica("warm", max_ongoing=2, resident=["sql"], free_slots=0)
        other = StubReplica("other", max_ongoing=2, free_slots=0)
        warm.queue_len = 2
        router = build(warm, other)
        await asyncio.sleep(0.01)
        call = asyncio.create_task(route(router, request("sql")))
        await asyncio.sleep(0.05)
        assert not call.done()
        warm.queue_len = 0
        assert await call == "warm"

    run(main())


def test_a_dead_replica_is_not_chosen_again() -> None:
    """FR-65: only the dead replica leaves the table."""

    async def main() -> None:
        dead, alive = StubReplica("dead", resident=["sql"]), StubReplica("alive")
        router = build(dead, alive)
        assert await route(router, request("sql")) == "dead"
        router.on_replica_actor_died(dead.replica_id)
        assert await route(router, request("sql")) == "alive"

    run(main())


def test_the_private_hook_that_we_override_still_exists() -> None:
    assert callable(RequestRouter._fulfill_next_pending_request)
    assert callable(FIFOMixin._fulfill_next_pending_request)
