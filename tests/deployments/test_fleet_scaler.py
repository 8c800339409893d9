"""The loop between replicas and the rule of `router.autoscaling`, over fake replicas."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve._private.common import DeploymentID
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.config import AppArgs
from deployments.engine_replica import TOLD_FOR_S
from deployments.fleet_scaler import FleetScaler, decode_load, encode_load
from deployments.replica_books import MAX_WANTED, UNWANTED_AFTER_S, ReplicaBooks
from deployments.scaling_policy import POLICY, WANTED, as_told
from engine.errors import ModelNotFound, Unavailable
from engine.request import AdapterRef
from engine.stats import BASE
from router.autoscaling import HANDOVER_S, Bounds
from tests.deployments.test_engine_replica import request, run, started

STATS: dict[str, Any] = {
    "running": 3, "waiting": 2, "max_num_seqs": 8, "slots": {"total": 4, "used": 2}, "page_tokens": 16,
    "tokens": {"queued": 700, "running": 4096}, "step_cost": [0.005, 2.5e-4, 3e-5, 1e-6], "lora_pages": 10,
    "pages": {"total": 100, "free": 30, "kv": 40, "prefix": 10, "adapters": 20},
    "adapters": {
        "running": {"tier": "hbm", "running": 2, "waiting": 0},
        "waiting": {"tier": "loading", "running": 0, "waiting": 2},
        "idle": {"tier": "host", "running": 0, "waiting": 0},
        BASE: {"running": 1, "waiting": 0},
    },
}  # fmt: skip


class Replicas:
    """Answers to broadcasts; a replica that takes over holds it."""

    def __init__(self, *loads: dict[str, Any]) -> None:
        self.loads = list(loads)
        self.told: list[int | None] = []
        self.is_busy = False
        self.taken: list[tuple[str, str]] = []
        self.take_over_s = 0.0

    async def broadcast(self, method: str, *args: Any, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        if self.is_busy or not self.loads:
            cause = TimeoutError() if self.is_busy else DeploymentUnavailableError(DeploymentID("engine"))
            raise Unavailable("no replica is available") from cause
        if method == "scaling":
            self.told.append(args[0])
            return self.loads
        assert method == "take_over"
        if self.take_over_s > timeout_s:
            raise Unavailable("no replica is available") from TimeoutError()
        for load in self.loads:
            for ref in args[0].get(load["replica_id"], ()):
                self.taken.append((load["replica_id"], ref["name"]))
                load["holds"].append(ref["name"])
        return [{"errors": []} for _ in self.loads]


async def lookup(name: str) -> AdapterRef:
    if name == "removed":
        raise ModelNotFound("no such adapter")
    return AdapterRef(name, f"s3://bucket/{name}")


def load(replica_id: str, holds: tuple[str, ...] = (), wanted: tuple[str, ...] = ()) -> dict[str, Any]:
    return {**encode_load({**STATS, "adapters": {}}, list(wanted), replica_id), "holds": list(holds)}


def test_a_load_tells_pages_in_use_and_adapters_by_what_they_do() -> None:
    told = decode_load(encode_load(STATS, ["idle"], "r1"))
    assert (told.num_requests, told.seats, told.slots, told.used_pages) == (5, 8, 4, 50)
    assert told.need == pytest.approx((50 + 700 / 16) / 100)
    assert told.in_use == {"running", "waiting"}
    assert told.wanted == {"idle"}
    assert told.holds == {"running", "idle"}
    assert decode_load(encode_load({}, [], "starting")).need == 0.0


def test_an_adapter_is_wanted_for_a_minute_after_its_last_request() -> None:
    books = ReplicaBooks()
    for name in ("long", "short", BASE):
        books.arrived(name, "home", now=0.0)
    books.ended("short", now=5.0, error=None)
    assert books.wanted(now=5.0 + UNWANTED_AFTER_S) == ["long", "short"]
    assert books.wanted(now=6.0 + UNWANTED_AFTER_S) == ["long"]
    for i in range(2 * MAX_WANTED):
        books.arrived(f"a{i}", "home", now=100.0)
    assert len(books.wanted(now=100.0)) == MAX_WANTED


def test_hot_adapters_are_elsewhere_before_a_smaller_fleet_is_told() -> None:
    async def main() -> None:
        replicas = Replicas(load("r1", ("hot", "cold"), ("hot", "removed")), load("r2", ("removed",)))
        for one in replicas.loads:
            one["num_requests"] = one["used_pages"] = one["queued_tokens"] = 0
        scaler = FleetScaler(Bounds(1, 4, 0.0, 0.0), replicas.broadcast, lookup)
        await scaler.look(0.0)
        await scaler.look(0.5)  # before the load has begun
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert replicas.taken == [("r2", "hot")]
        await scaler.look(1.0)
        assert replicas.told == [None, None, None]
        replicas.loads[0]["wanted"].remove("removed")
        await scaler.look(2.0)
        replicas.loads.pop()
        await scaler.look(3.0)
        assert replicas.told[3:] == [None, 1]

    asyncio.run(main())


def two_of_which_one_may_go() -> Replicas:
    """The first one alone holds an adapter that is wanted."""
    idle = {"num_requests": 0, "queued_tokens": 0, "used_pages": 0}
    return Replicas(load("r1", ("hot",), ("hot",)) | idle, load("r2") | idle)


def test_adapters_that_take_a_while_to_load_are_handed_over() -> None:
    async def main() -> None:
        replicas = two_of_which_one_may_go()
        replicas.take_over_s = 30.0
        await FleetScaler(Bounds(1, 4, 0.0, 0.0), replicas.broadcast, lookup).look(0.0)
        await asyncio.sleep(0.01)
        assert replicas.taken == [("r2", "hot")]

    asyncio.run(main())


def test_a_handover_that_nobody_heard_is_told_again() -> None:
    async def main() -> None:
        replicas = two_of_which_one_may_go()
        scaler = FleetScaler(Bounds(1, 4, 0.0, 0.0), replicas.broadcast, lookup)
        replicas.take_over_s = 2 * HANDOVER_S
        await scaler.look(0.0)
        await asyncio.sleep(0.01)
        assert replicas.taken == []
        replicas.take_over_s = 0.0
        await scaler.look(1.0)
        await asyncio.sleep(0.01)
        assert replicas.taken == [("r2", "hot")]

    asyncio.run(main())


def test_nobody_to_ask_is_no_failure() -> None:
    async def main() -> None:
        replicas = Replicas()
        scaler = FleetScaler(Bounds(0, 4, 0.0, 0.0), replicas.broadcast, lookup)
        await scaler.look(0.0)
        replicas.loads.append(load("r1"))
        await scaler.look(1.0)
        await scaler.look(2.0)
        # not that there should be none: Serve has started one for somebody who asked
        assert replicas.told == [None, 2]

    asyncio.run(main())


def test_a_fleet_too_busy_to_answer_is_not_taken_for_an_empty_one() -> None:
    async def main() -> None:
        replicas = Replicas({**load("r1"), "num_requests": 80})
        scaler = FleetScaler(Bounds(1, 4, 10.0, 0.0), replicas.broadcast, lookup)
        for now in range(13):
            replicas.is_busy = 3 <= now < 12
            await scaler.look(float(now))
        replicas.is_busy = False
        await scaler.look(13.0)
        assert replicas.told == [None, None, None, None, 4]

    asyncio.run(main())


def test_a_replica_carries_what_it_was_told_and_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with started() as replica:
            await run(replica, request(adapter="sql"))
            assert await replica.record_autoscaling_stats() == {}
            told = await replica.scaling(3)
            assert (told["replica_id"], told["wanted"], told["holds"]) == ("r1", ["sql"], ["sql"])
            await replica.scaling(None)
            assert await replica.record_autoscaling_stats() == {WANTED: 3}
            monkeypatch.setattr("deployments.engine_replica.TOLD_FOR_S", 0.0)
            assert await replica.record_autoscaling_stats() == {}

    asyncio.run(main())


def test_a_replica_takes_over_what_is_meant_for_it() -> None:
    async def main() -> None:
        async with started() as replica:
            mine = [{"name": "a", "uri": "x", "version": ""}, {"name": "b", "uri": "refused:", "version": ""}]
            answer = await replica.take_over({"r1": mine, "r2": [{"name": "c", "uri": "x", "version": ""}]})
            assert [error["param"] for error in answer["errors"]] == ["use_dora"]
            assert (await replica.scaling(None))["holds"] == ["a"]

    asyncio.run(main())


def test_what_is_unloaded_during_a_handover_does_not_come_with_it() -> None:
    async def main() -> None:
        async with started(load_s=0.01) as replica:
            refs = [{"name": name, "uri": "x", "version": ""} for name in ("a", "b")]
            handover = asyncio.create_task(replica.take_over({"r1": refs}))
            await asyncio.sleep(0)
            await replica.unload_adapter("b")
            assert await handover == {"errors": []}
            assert (await replica.scaling(None))["holds"] == ["a"]

    asyncio.run(main())


def point(timestamp: float, value: float) -> SimpleNamespace:
    return SimpleNamespace(timestamp=timestamp, value=value)


def test_serve_does_what_was_told_last() -> None:
    series = {"r1": [point(1.0, 2.0), point(3.0, 5.0)], "r2": [point(2.0, 4.0)], "r3": []}
    assert as_told(SimpleNamespace(raw_metrics={WANTED: series}, target_num_replicas=9)) == (5, {})
    assert as_told(SimpleNamespace(raw_metrics={WANTED: {"r3": []}}, target_num_replicas=9)) == (9, {})
    assert as_told(SimpleNamespace(raw_metrics={}, target_num_replicas=9)) == (9, {})


def test_serve_finds_the_policy_and_keeps_what_was_told_as_long_as_replicas_do() -> None:
    config = AutoscalingConfig(
        policy=AutoscalingPolicy(policy_function=POLICY), look_back_period_s=TOLD_FOR_S
    )
    policy = config.policy.get_policy()
    assert policy(SimpleNamespace(raw_metrics={}, target_num_replicas=1)) == (1, {})


@pytest.mark.parametrize(("num_replicas", "least", "most"), [(1, 2, 4), (5, 1, 4), (2, 3, 2)])
def test_bounds_that_cannot_be_are_refused(num_replicas: int, least: int, most: int) -> None:
    scaling = {"min_replicas": least, "max_replicas": most}
    with pytest.raises(ValidationError):
        AppArgs.model_validate({"model": "m", "num_replicas": num_replicas, "autoscaling": scaling})
