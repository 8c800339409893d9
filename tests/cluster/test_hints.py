"""Real engines behind the real router, all full: what waits for a place finds its adapter loaded."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

from deployments.app import engine_application
from deployments.config import AppArgs, RouterArgs
from deployments.engine_replica import ENGINE_CLIENT
from deployments.fleet_service import FleetService
from engine.errors import EngineDead, ModelNotFound
from engine.request import AdapterRef, GenerateRequest
from engine.sampling_params import SamplingParams
from router.fleet_table import hash64, rendezvous
from tests.cluster.conftest import SAFE, FakeCatalog
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.cluster

NUM_REPLICAS, SEATS = 2, 4
MAX_TOKENS = 6000  # of requests that only keep a place
PLACES = NUM_REPLICAS * 2 * SEATS  # half of them to wait for a seat
ADAPTERS = ("waits", "gives-up", "survives")


@dataclass(frozen=True, slots=True)
class Fleet:
    service: FleetService
    root: Path

    async def ask(self, adapter: str) -> int:
        """How many tokens came."""
        request = self._request(adapter, 4)
        return sum([len(d.token_ids) async for deltas in self.service.generate(request) for d in deltas])

    @asynccontextmanager
    async def full(self) -> AsyncGenerator[dict[str, AsyncExitStack], None]:
        """Until the end every place is taken; those of a replica get free when its stack is closed."""
        async with AsyncExitStack() as stack:
            before = await self.num_requests()
            taken = {replica: await stack.enter_async_context(AsyncExitStack()) for replica in before}
            for count in range(1, PLACES + 1):
                async with AsyncExitStack() as one:
                    await one.enter_async_context(self._long_request())
                    await until(partial(self.num_requests_is, count))
                    now = await self.num_requests()
                    (replica,) = (r for r in now if now[r] > before[r])
                    taken[replica].push_async_exit(one.pop_all())
                before = now
            yield taken

    @asynccontextmanager
    async def _long_request(self) -> AsyncGenerator[None, None]:
        async def run() -> None:
            async with aclosing(self.service.generate(self._request(None, MAX_TOKENS))) as stream:
                async for _ in stream:
                    pass

        running = asyncio.create_task(run())
        yield
        running.cancel()
        (end,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError | EngineDead), "it ended too early"

    def _request(self, adapter: str | None, max_tokens: int) -> GenerateRequest:
        ref = AdapterRef(adapter, str(self.root / adapter), "1") if adapter else None
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return GenerateRequest(uuid.uuid4().hex, tuple(b"The quick"), params, ref)

    async def replicas(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = (await self.service.stats())["replicas"]
        return replicas

    async def is_idle(self) -> bool:
        return await self.num_requests_is(0)

    async def num_requests_is(self, count: int) -> bool:
        return sum((await self.num_requests()).values()) == count

    async def num_requests(self) -> dict[str, int]:
        return {r["replica"]: r.get("running", 0) + r.get("waiting", 0) for r in await self.replicas()}

    async def tiers(self, adapter: str) -> list[str]:
        """Of the replicas that know it."""
        return [r["adapters"][adapter]["tier"] for r in await self.replicas() if adapter in r["adapters"]]

    async def is_in(self, tier: str, adapter: str) -> bool:
        return await self.tiers(adapter) == [tier]

    async def lookups(self, adapter: str) -> dict[str, int]:
        """Where its requests found it when they arrived."""
        entries = [r["adapters"][adapter] for r in await self.replicas() if adapter in r["adapters"]]
        found = {tier: sum(e["hits"][tier] for e in entries) for tier in ("hbm", "host")}
        return found | {"source": sum(e["misses"] for e in entries)}

    async def num_hinted(self) -> int:
        return sum(r["prefetches"]["hint"]["copied"] for r in await self.replicas())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  the engines tell their statistics, not their events
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def fleet(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("hints")
    base = make_llama(root / "base", max_position_embeddings=8192)
    for seed, name in enumerate(ADAPTERS):
        make_adapter(base, root / name, rank=8, targets=ALL_LINEAR, seed=seed)
    args = AppArgs(
        model=str(base),
        num_replicas=NUM_REPLICAS,
        engine={"max_num_seqs": SEATS, "num_pages": 2000, "num_threads": 1},
        router=RouterArgs(max_wait_s=60.0),
        stream_interval_s=0.0,
        graceful_shutdown_timeout_s=1.0,
    )
    catalog = serve.deployment(FakeCatalog).options(name="catalog", **SAFE).bind([])
    handle = serve.run(engine_application(args, catalog, ENGINE_CLIENT), name="hints", route_prefix=None)
    yield Fleet(FleetService(handle, "base", 8192, load_timeout_s=10.0), root)
    serve.delete("hints")


def test_what_waits_is_loaded_meanwhile_by_one_replica(fleet: Fleet) -> None:
    async def main() -> None:
        async with fleet.full() as taken:
            waiting = [asyncio.create_task(fleet.ask("waits")) for _ in range(3)]
            await until(lambda: fleet.is_in("host", "waits"))
            await asyncio.sleep(0.5)  # and router looks at who waits
            assert await fleet.tiers("waits") == ["host"]
            assert not any(task.done() for task in waiting)
            for task in waiting[1:]:  # several might go to several replicas, when these have places
                task.cancel()
            (home,) = (r["replica"] for r in await fleet.replicas() if "waits" in r["adapters"])
            await taken[home].aclose()  # first: whoever has a place gets what waits
            assert await waiting[0] == 4
        await until(fleet.is_idle)  # so that statistics are exact
        lookups = await fleet.lookups("waits")
        assert (lookups["hbm"] + lookups["host"], lookups["source"]) == (1, 0)

    asyncio.run(main())


def test_what_was_hinted_is_in_the_pool_as_soon_as_there_is_time(fleet: Fleet) -> None:
    """A CPU copies between requests only, so here the one that waited does not come after all."""

    async def main() -> None:
        before = await fleet.num_hinted()
        async with fleet.full():
            waiting = asyncio.create_task(fleet.ask("gives-up"))
            await until(lambda: fleet.is_in("host", "gives-up"))
            waiting.cancel()
        await until(lambda: fleet.is_in("hbm", "gives-up"))
        assert await fleet.num_hinted() == before + 1
        await until(fleet.is_idle)
        await asyncio.sleep(1.0)  # and routers have heard so
        assert await fleet.ask("gives-up") == 4
        await until(fleet.is_idle)
        assert await fleet.lookups("gives-up") == {"hbm": 1, "host": 0, "source": 0}
        assert 'lorafleet_prefetches_total{reason="hint"' in await fleet.service.metrics_text()

    asyncio.run(main())


def test_a_hint_that_fails_and_a_replica_that_dies_harm_no_request(fleet: Fleet) -> None:
    async def main() -> None:
        async with fleet.full():
            unknown = asyncio.create_task(fleet.ask("unknown"))
            await asyncio.sleep(0.2)
            ids = [r["replica"] for r in await fleet.replicas()]
            home = max(
                ids, key=lambda one: int(rendezvous("survives", np.array([hash64(one)], np.uint64))[0])
            )
            ray.kill(ray.get_actor(f"SERVE_REPLICA::hints#engine#{home}", namespace="serve"))
            waiting = asyncio.create_task(fleet.ask("survives"))
            await asyncio.sleep(0.2)
        with pytest.raises(ModelNotFound):
            await unknown
        assert await waiting == 4

    asyncio.run(main())
