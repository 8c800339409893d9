"""One replica in process, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deployments import engine_replica
from deployments.engine_replica import LOAD_CALLS, EngineReplica, ReplicaSettings
from deployments.wire import decode_chunk
from engine.config import EngineConfig
from engine.errors import EngineDead, LorafleetError, Unavailable
from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from engine.stats import BASE
from engine.wire import encode_ref, encode_request
from tests.cluster.fake_engine import DIE_AT_THIRD, OVERLOADED, FakeEngineClient

SETTINGS = ReplicaSettings(stream_interval_s=0.0, engine_client="tests.cluster.fake_engine:FakeEngineClient")


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes that the replica wanted to exit with."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


@asynccontextmanager
async def started(**delays: float) -> AsyncIterator[EngineReplica]:
    replica = EngineReplica(
        EngineConfig(model=json.dumps(delays), max_adapters=2, max_num_seqs=4), SETTINGS, "r1"
    )
    await replica.start()
    yield replica
    await replica.stop()


def request(*prompt: int, adapter: str | None = None, uri: str = "x", max_tokens: int = 3) -> dict[str, Any]:
    ref = AdapterRef(adapter, uri) if adapter else None
    params = SamplingParams(max_tokens=max_tokens)
    return encode_request(GenerateRequest("id", prompt or (1,), params, ref))


async def run(replica: EngineReplica, data: dict[str, Any], route: str = "home") -> list[Any]:
    """All deltas; an error at the end as it is."""
    items: list[Any] = []
    async for chunk in replica.generate(data, route):
        try:
            items.extend(decode_chunk(chunk))
        except LorafleetError as error:
            items.append(error)
    return items


def test_a_request_becomes_chunks_of_deltas() -> None:
    async def main() -> None:
        async with started() as replica:
            deltas = await run(replica, request(adapter="sql"))
            assert [d.num_output_tokens for d in deltas] == [1, 2, 3]
            assert deltas[-1].finish_reason == "length"
            stats = await replica.stats()
            assert stats["replica"] == "r1"
            assert stats["routes"] == {"home": 1}
            assert stats["adapters"]["sql"]["ttft_count"] == 1
            assert stats["adapters"]["sql"]["finished"] == {"length": 1}
            for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
                assert sum(stats[name]["counts"]) == 1

    asyncio.run(main())


def test_what_the_engine_refuses_is_told_whether_it_was_asked_for_or_preloaded() -> None:
    async def main() -> None:
        told: list[tuple[dict[str, str], str | None]] = []
        replica = EngineReplica(
            EngineConfig(model="x"), SETTINGS, "r1", lambda ref, error: told.append((ref, error.param))
        )
        await replica.start()
        bad = encode_ref(AdapterRef("bad", "refused:x", "1"))
        await replica.warm([bad, encode_ref(AdapterRef("good", "x", "1"))])
        (error,) = await run(replica, request(adapter="sql", uri="refused:y"))
        assert type(error).__name__ == "AdapterRefused"
        await run(replica, request(OVERLOADED, adapter="good"))
        assert told == [(bad, "use_dora"), (encode_ref(AdapterRef("sql", "refused:y")), "use_dora")]
        await replica.stop()

    asyncio.run(main())


def test_a_fault_of_ours_is_counted_as_an_error_and_not_as_a_client_that_left() -> None:
    async def main() -> None:
        async with started() as replica:
            broken = request(adapter="sql")
            del broken["prompt_token_ids"]
            with pytest.raises(KeyError):
                await run(replica, broken)
            stats = await replica.stats()
            assert stats["adapters"]["sql"]["errors"] == {"internal_error": 1}
            assert stats["adapters"]["sql"]["finished"] == {"error": 1}

    asyncio.run(main())


def test_an_error_of_the_engine_is_the_streams_last_item_and_is_counted() -> None:
    async def main() -> None:
        async with started() as replica:
            (error,) = await run(replica, request(OVERLOADED, adapter="sql"))
            assert (type(error).__name__, error.retry_after_s) == ("Overloaded", 3.0)
            stats = await replica.stats()
            assert stats["adapters"]["sql"]["errors"] == {"overloaded": 1}
            assert stats["adapters"]["sql"]["finished"] == {"error": 1}
            assert sum(stats["e2e_seconds"]["counts"]) == 0

    asyncio.run(main())


def test_bad_parameters_are_an_error_item_too() -> None:
    async def main() -> None:
        async with started() as replica:
            data = request()
            data["params"]["top_p"] = 7.0
            (error,) = await run(replica, data)
            assert (error.status, error.param) == (400, "top_p")

    asyncio.run(main())


def test_a_request_that_was_sent_for_what_is_resident_no_more_is_counted() -> None:
    """Only the router's claim counts: who comes home finds nothing either, and nobody was wrong."""

    async def main() -> None:
        async with started() as replica:
            await run(replica, request(adapter="sql"))
            await run(replica, request(adapter="sql"), route="resident")
            assert (await replica.stats())["stale_misroutes"] == 0
            await replica.unload_adapter("sql")
            deltas = await run(replica, request(adapter="sql"), route="resident")
            assert deltas[-1].finish_reason == "length"
            assert (await replica.stats())["stale_misroutes"] == 1

    asyncio.run(main())


def test_closing_the_stream_aborts_the_request() -> None:
    """FR-56: nothing stays in flight."""

    async def main() -> None:
        async with started(token_s=0.01) as replica:
            stream = replica.generate(request(max_tokens=1000), route="home")
            await anext(stream)
            assert (await replica.stats())["running"] == 1
            await stream.aclose()
            stats = await replica.stats()
            assert (stats["running"], stats["num_aborted"]) == (0, 1)
            assert stats["adapters"][BASE]["finished"] == {"abort": 1}

    asyncio.run(main())


def test_load_and_unload_answer_with_values() -> None:
    async def main() -> None:
        async with started() as replica:
            assert (await replica.load_adapter(encode_ref(AdapterRef("sql", "x"))))["result"][
                "status"
            ] == "ok"
            assert (await replica.record_routing_stats())["resident"] == ["sql"]
            assert await replica.unload_adapter("sql") == {"result": None}
            assert (await replica.record_routing_stats())["resident"] == []
            assert (await replica.unload_adapter("sql"))["error"]["class"] == "ModelNotFound"
            refused = await replica.load_adapter(encode_ref(AdapterRef("bad", "refused:")))
            assert refused["error"]["param"] == "use_dora"

    asyncio.run(main())


def test_loads_are_bounded_so_that_they_take_no_place_of_other_calls() -> None:
    async def main() -> None:
        async with started(load_s=0.01) as replica:
            refs = [encode_ref(AdapterRef(f"a{number}", "x")) for number in range(LOAD_CALLS)]
            loads = [asyncio.create_task(replica.load_adapter(ref)) for ref in refs]
            await asyncio.sleep(0)
            more = encode_ref(AdapterRef("more", "x"))
            (error,) = (await replica.take_over({"r1": [more]}))["errors"]
            assert error == (await replica.load_adapter(more))["error"]
            assert (error["class"], error["retry_after_s"]) == ("Unavailable", 1.0)
            assert all("result" in answer for answer in await asyncio.gather(*loads))
            assert "result" in await replica.load_adapter(more)

    asyncio.run(main())


def test_a_request_that_comes_after_the_unload_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with started() as replica:
            await replica.load_adapter(encode_ref(AdapterRef("sql", "x")))
            await replica.unload_adapter("sql")
            await run(replica, request(OVERLOADED, adapter="sql"))
            assert "sql" not in (await replica.stats())["adapters"]
            await replica.load_adapter(encode_ref(AdapterRef("sql", "x")))
            await run(replica, request(adapter="sql"))
            assert (await replica.stats())["adapters"]["sql"]["finished"] == {"length": 1}

    asyncio.run(main())


def test_a_hint_loads_and_nobody_hears_of_one_that_fails() -> None:
    async def main() -> None:
        async with started() as replica:
            await replica.prefetch(encode_ref(AdapterRef("bad", "refused:")))
            await replica.prefetch(encode_ref(AdapterRef("sql", "x")))
            await asyncio.sleep(0.01)
            assert (await replica.record_routing_stats())["resident"] == ["sql"]
            await run(replica, request(DIE_AT_THIRD, max_tokens=9))
            await replica.prefetch(encode_ref(AdapterRef("other", "x")))

    asyncio.run(main())


def test_warming_loads_what_fits_and_survives_a_bad_adapter() -> None:
    """FR-66: a new replica has the wanted adapters before it is ready."""

    async def main() -> None:
        wanted = [AdapterRef("bad", "refused:"), AdapterRef("sql", "x"), AdapterRef("third", "x")]
        async with started() as replica:
            await replica.warm([encode_ref(ref) for ref in wanted])
            assert (await replica.record_routing_stats())["resident"] == ["sql"]

    asyncio.run(main())


def test_a_pinned_adapter_is_waited_for_while_its_source_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FR-66. Others are not: one source that is down must not keep the base model away."""
    monkeypatch.setattr(engine_replica, "WAITS_S", (0.0, 0.0, 0.0))
    tries = Counter[str]()

    async def load(self: FakeEngineClient, ref: AdapterRef) -> dict[str, Any]:
        tries[ref.name] += 1
        if ref.name == "other" or tries[ref.name] < 3:
            raise Unavailable("S3 does not answer")
        return {}

    monkeypatch.setattr(FakeEngineClient, "load_adapter", load)

    async def main() -> None:
        config = EngineConfig(model="{}", pinned_adapters=("pinned",))
        replica = EngineReplica(config, SETTINGS, "r1")
        await replica.start()
        await replica.warm([encode_ref(AdapterRef(name, "x")) for name in ("pinned", "other")])
        await replica.stop()

    asyncio.run(main())
    assert tries == {"pinned": 3, "other": 1}


def test_a_dead_engine_ends_its_replica_at_once(exits: list[int]) -> None:
    async def main() -> None:
        async with started() as replica:
            await replica.check_health()
            items = await run(replica, request(DIE_AT_THIRD, max_tokens=9))
            assert isinstance(items[-1], EngineDead)
            assert exits == [1]
            with pytest.raises(EngineDead):
                await replica.check_health()

    asyncio.run(main())


def test_a_stop_on_purpose_is_no_death(exits: list[int]) -> None:
    async def main() -> None:
        async with started():
            pass
        await asyncio.sleep(0)
        assert exits == []

    asyncio.run(main())


def test_the_router_learns_the_replicas_size() -> None:
    async def main() -> None:
        async with started() as replica:
            size = {"max_num_seqs": 4, "max_adapters": 2, "max_requests": 8}
            assert await replica.record_replica_metadata() == size
            assert await replica.facts() == {"max_model_len": 256}

    asyncio.run(main())
