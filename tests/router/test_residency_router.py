"""The real router object with stub replicas: no cluster, no Serve controller."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter

from router.from_serve import read_request
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
        self.num_asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        return 0


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


def busy(name: str, adapter: str, running: int = 2) -> StubReplica:
    """Accepts two requests."""
    return StubReplica(name, max_ongoing=2, resident=[adapter], free_slots=0, running=running)


def report(router: ResidencyRouter, *replicas: StubReplica) -> None:
    """What the controller broadcasts."""
    router.update_replicas(list(replicas))


@pytest.mark.parametrize("other", ["other", BASE_ID])
def test_queued_requests_get_the_replica_that_was_chosen_for_them(other: str) -> None:
    """Serve hands a replica to the queue's head when it cannot tell the call; the head may be another's."""

    async def main() -> None:
        full, warm = busy("full", other), busy("warm", "sql")
        router = build(full, warm)
        # the head of the queue waits; the calls of one parent wait for "warm"
        head = asyncio.create_task(route(router, request(other, internal_id="head")))
        await asyncio.sleep(0.01)
        fan_out = [asyncio.create_task(route(router, request("sql", internal_id="p"))) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in (head, *fan_out))
        if other == BASE_ID:
            full.routing_stats = {**full.routing_stats, "running": 0}
            report(router, full, warm)
            assert await head == "full"
        warm.routing_stats = {**warm.routing_stats, "running": 0}
        report(router, full, warm)
        assert await asyncio.gather(*fan_out) == ["warm", "warm"]
        if other != BASE_ID:
            full.routing_stats = {**full.routing_stats, "running": 0}
            report(router, full, warm)
            assert await head == "full"

    run(main())


def test_a_full_warm_replica_is_waited_for_when_nobody_has_room() -> None:
    async def main() -> None:
        warm, other = busy("warm", "sql"), busy("other", "x", running=0)
        router = build(warm, other)
        call = asyncio.create_task(route(router, request("sql")))
        await asyncio.sleep(0.05)
        assert not call.done()
        warm.routing_stats = {**warm.routing_stats, "running": 1}
        report(router, warm, other)
        assert await call == "warm"

    run(main())


def test_choosing_asks_no_replica() -> None:
    """Serve's own router asks a replica that was idle or is full for its queue length, and waits for it."""

    async def main() -> None:
        warm = busy("warm", "sql", running=0)
        router = build(warm)
        await asyncio.sleep(0.01)
        warm.num_asked = 0
        for _ in range(2):
            await route(router, request("sql"))
        waiting = asyncio.create_task(route(router, request("sql")))
        await asyncio.sleep(0.05)
        assert warm.num_asked == 0
        finish(router, warm)
        await waiting

    run(main())


def finish(router: ResidencyRouter, replica: StubReplica) -> None:
    """A request on it ended."""
    router.on_request_completed(replica.replica_id, "parent")


def test_its_books_follow_requests_broadcasts_and_rejections() -> None:
    async def main() -> None:
        a = StubReplica("a", max_ongoing=4)
        router = build(a)

        def load() -> int:
            count: int = router._table["a"].load
            return count

        for _ in range(3):
            await route(router, request("sql"))
        assert load() == 3
        router.on_send_request(a.replica_id)  # a broadcast
        assert load() == 4
        finish(router, a)
        finish(router, a)
        assert load() == 2
        # another router's requests are there: it rejects ours, which then ends
        rejected = request("sql")
        await router._choose_replica_for_request(rejected)
        router.on_send_request(a.replica_id)
        router.on_new_queue_len_info(a.replica_id, 4)
        finish(router, a)
        assert load() == 4
        router._table.check_invariants()

    run(main())


def test_what_serve_takes_beyond_the_replicas_own_limit_is_not_for_requests() -> None:
    """It is for statistics, health and hints; an answer below Serve's limit is no rejection."""

    async def main() -> None:
        a = StubReplica("a", max_ongoing=6)
        a.replica_metadata["max_requests"] = 2
        router = build(a)
        for _ in range(2):
            await route(router, request("sql"))
        waiting = asyncio.create_task(route(router, request("sql")))
        for answer in (2, 5):  # another router's requests, and other calls
            router.on_new_queue_len_info(a.replica_id, answer)
            assert router._table["a"].load == answer
            await asyncio.sleep(0.02)
            assert not waiting.done()
        router.on_new_queue_len_info(a.replica_id, 2)
        finish(router, a)
        assert await waiting == "a"
        router._table.check_invariants()

    run(main())


def test_stats_are_read_once_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        a = StubReplica("a", resident=["sql"], running=1, step_cost=[0.01, 1e-4, 1e-4, 1e-6])
        router = build(a)
        told: list[str] = []
        tell = router._table.tell

        def spy(replica_id: str, *args: Any) -> None:
            told.append(replica_id)
            tell(replica_id, *args)

        monkeypatch.setattr(router._table, "tell", spy)
        report(router, a)
        assert told == []
        a.routing_stats = {**a.routing_stats, "running": 2}
        report(router, a)
        assert told == ["a"]
        assert router._table["a"].report.cost.base_s == 0.01

    run(main())


def test_the_prompt_is_told_to_the_policy() -> None:
    """Its length, and what it begins with: the same in every process."""

    async def main() -> None:
        told = []
        for tokens in (tuple(range(100)), [*range(64), 7, 8, 9]):
            pending = request("sql")
            pending.args = [{"prompt_token_ids": tokens, "adapter": None}]
            told.append(read_request(pending))
        first, second = told
        assert (first.adapter, first.num_tokens, second.num_tokens) == ("sql", 100, 67)
        assert first.prefix == second.prefix == hash(tuple(range(64)))
        assert read_request(request("sql")).num_tokens == 0

    run(main())


def test_a_full_fleet_refuses_at_once_what_would_wait_too_long() -> None:
    """Bounded waiting: ten wait, one ends in a quarter of a second, so the next would wait for 2.5 s."""

    async def main() -> None:
        full = busy("full", "sql", running=3)
        router = build(full)
        router._max_wait_s = 2.0
        queued = [asyncio.create_task(route(router, request("sql"))) for _ in range(10)]
        await asyncio.sleep(0.01)
        assert router._num_waiting == 10  # a burst waits
        router._busy_since -= 4.0
        router._num_ended = 15
        started = time.monotonic()
        with pytest.raises(BackPressureError):
            await route(router, request("sql"))
        assert time.monotonic() - started < 0.1
        router._num_ended = 30
        fine = asyncio.create_task(route(router, request("sql")))
        await asyncio.sleep(0.01)
        assert not fine.done()
        for task in (*queued, fine):
            task.cancel()
        await asyncio.gather(*queued, fine, return_exceptions=True)
        assert router._num_waiting == 0

    run(main())


def test_broadcasts_do_not_make_the_fleet_look_fast() -> None:
    """Each probe and each scrape asks every replica, and a call of theirs is no request that has ended."""

    async def main() -> None:
        full = busy("full", "sql", running=3)
        router = build(full)
        waiting = asyncio.create_task(route(router, request("sql")))
        await asyncio.sleep(0.01)
        router.on_send_request(full.replica_id)
        finish(router, full)
        assert router._num_ended == 0
        finish(router, full)
        assert router._num_ended == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(main())


def test_nobody_waits_longer_than_the_bound() -> None:
    async def main() -> None:
        router = build(busy("full", "sql"))
        router._max_wait_s = 0.1
        with pytest.raises(BackPressureError):
            await route(router, request("sql"))

    run(main())


def test_the_time_for_a_first_token_runs_while_a_request_waits_here() -> None:
    """Its engine is told what is left of it, and would else wait for as long once more."""

    async def main() -> None:
        full = busy("full", "sql")
        router = build(full)

        def within(timeout_s: float) -> PendingRequest:
            pending = request("sql")
            pending.args = [{"prompt_token_ids": [1], "adapter": None, "timeout_s": timeout_s}]
            return pending

        with pytest.raises(BackPressureError):
            await route(router, within(0.1))
        patient = within(60.0)
        call = asyncio.create_task(route(router, patient))
        await asyncio.sleep(0.1)
        full.routing_stats = {**full.routing_stats, "running": 1}
        report(router, full)
        assert await call == "full"
        assert 50.0 < patient.args[0]["timeout_s"] <= 59.9

    run(main())


def test_a_fleet_of_none_is_unavailable_not_full() -> None:
    """A request that wakes a fleet waits for it, so long at most; 503 tells the client more than 429."""

    async def main() -> None:
        router = build()
        router._max_wait_s = 0.1
        with pytest.raises(DeploymentUnavailableError):
            await route(router, request("sql"))

    run(main())


def test_all_who_wake_a_fleet_wait_for_it() -> None:
    """That no request ends before it is there says nothing of how long they will wait."""

    async def main() -> None:
        router = build()
        router._max_wait_s = 5.0
        waiting = [asyncio.create_task(route(router, request("sql"))) for _ in range(3)]
        await asyncio.sleep(0.01)
        router._busy_since -= 4.0
        waiting.append(asyncio.create_task(route(router, request("sql"))))
        await asyncio.sleep(0.01)
        router.update_replicas([StubReplica("woken")])
        assert await asyncio.gather(*waiting) == ["woken"] * 4

    run(main())


def test_who_gives_up_as_he_gets_a_replica_holds_no_place_there() -> None:
    """Serve never sends what he was chosen it for, so nobody would say that it ended."""

    async def main() -> None:
        router = build(StubReplica("a"))
        call = asyncio.create_task(router._choose_replica_for_request(request("sql")))
        fulfill = router._fulfill_next_pending_request

        def fulfill_and_cancel(*args: Any) -> None:
            fulfill(*args)
            call.cancel()

        router._fulfill_next_pending_request = fulfill_and_cancel  # type: ignore[assignment]
        with pytest.raises(asyncio.CancelledError):
            await call
        assert router._table["a"].load == 0
        assert not +router._selected

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


def test_a_replica_that_was_out_of_reach_is_not_given_up() -> None:
    """FR-65: neither while nobody has said that it died, nor when it turns out to be there."""

    async def main() -> None:
        lost, other = StubReplica("lost", resident=["sql"]), StubReplica("other")
        router = build(lost, other)
        router.on_replica_actor_unavailable(lost.replica_id)
        assert await route(router, request("sql")) == "lost"
        router.on_replica_actor_died(lost.replica_id)
        assert await route(router, request("sql")) == "other"
        router.update_replicas([lost, other])
        assert await route(router, request("sql")) == "lost"

    run(main())


def test_a_request_that_was_routed_or_gave_up_is_forgotten() -> None:
    """Serve's index by model id is emptied only by look-ups that this router has no use for."""

    async def main() -> None:
        router = build(busy("a", "sql", running=0))
        for i in range(2):
            await route(router, request("sql", internal_id=f"i{i}"))
        call = asyncio.create_task(route(router, request("sql", internal_id="late")))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.01)
        kept = [pending for queue in router._pending_requests_by_model_id.values() for pending in queue]
        assert not kept
        assert not router._pending_requests_by_id
        assert not router._pending_requests_to_fulfill

    run(main())


def test_the_private_hooks_that_we_override_still_exist() -> None:
    assert callable(RequestRouter._fulfill_next_pending_request)
    for name, parameters in {
        "_select_from_candidate_replicas": ["self", "candidates", "backoff_index"],
        "_choose_replica_for_request": ["self", "pending_request", "is_retry"],
        "_add_pending_request_to_indices": ["self", "pending_request"],
    }.items():
        assert list(inspect.signature(getattr(RequestRouter, name)).parameters) == parameters
