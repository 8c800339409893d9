"""One replica around one engine: requests in, chunks of deltas out, state for the router. No Ray, no HTTP."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from deployments.fleet_scaler import encode_load
from deployments.label_cap import DEFAULT_MAX_NAMES
from deployments.metrics_server import MetricsServer
from deployments.replica_books import ReplicaBooks, routing_stats
from deployments.request_times import RequestTimes, placed
from deployments.scaling_policy import WANTED
from deployments.wire import encode_deltas, encode_error, to_answer
from engine.config import EngineConfig
from engine.errors import AdapterRefused, EngineDead, LorafleetError, Unavailable
from engine.stats import BASE
from engine.wire import decode_ref, decode_request

logger = logging.getLogger(__name__)

WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # for what a replica needs before it serves
LOAD_CALLS = 16  # at once, twice those of the catalog's upkeep; they last, so they have places of their own
TOLD_FOR_S = 15.0  # what the autoscaler wanted so long ago it may want no more
INTERNAL_ERROR = "internal_error"
ENGINE_CLIENT = "engine.client:EngineClient"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    stream_interval_s: float = 0.04  # least time between two chunks of a stream
    metrics_max_adapters: int = DEFAULT_MAX_NAMES  # adapters that this replica's metrics name
    engine_client: str = ENGINE_CLIENT  # module:Class; tests bring a fake
    metrics_port: int | None = None  # of a page of its own; None: no page
    has_rank_actors: bool = False  # its group's other ranks are Ray actors


def max_requests(engine: EngineConfig) -> int:
    """That routers send to a replica: enough to fill seats that come free, and no queue behind its back."""
    return 2 * engine.max_num_seqs


OnRefused = Callable[[dict[str, str], AdapterRefused], None]
"""Told of a reference and why this engine cannot serve it."""


class EngineReplica:
    def __init__(
        self,
        engine: EngineConfig,
        settings: ReplicaSettings,
        replica_id: str,
        on_refused: OnRefused = lambda ref, error: None,
    ) -> None:
        module, _, name = settings.engine_client.partition(":")
        self._config = engine
        self._settings = settings
        self._replica_id = replica_id
        self._on_refused = on_refused
        self._books = ReplicaBooks(settings.metrics_max_adapters)
        self._client = getattr(importlib.import_module(module), name)(engine)
        self._watching: asyncio.Task[None]
        self._metrics: MetricsServer | None = None
        self._num_load_calls = 0
        self._wanted: tuple[int, float] | None = None  # replicas of the fleet, and when that was told

    @property
    def metrics_port(self) -> int | None:
        """Of its own page, if it has one."""
        return self._metrics.port if self._metrics else None

    async def start(self) -> None:
        await self._client.start()
        self._watching = asyncio.create_task(self._exit_with_the_engine())
        if self._settings.metrics_port is not None:
            self._metrics = MetricsServer(self._settings.metrics_port, self.stats)

    async def stop(self) -> None:
        self._watching.cancel()
        if self._metrics is not None:
            await self._metrics.stop()
        await self._client.stop()

    async def warm(self, refs: list[dict[str, str]]) -> None:
        """Load what fits; pinned adapters are waited for while their source does not answer.

        One bad adapter must not keep the replica from serving the others.
        """
        refs = refs[: self._config.max_adapters]
        answers = await asyncio.gather(*(self._warm_one(ref) for ref in refs))
        for ref, answer in zip(refs, answers, strict=True):
            if "error" in answer:
                logger.warning("adapter %s is not preloaded: %s", ref["name"], answer["error"]["code"])
                self._tell_if_refused(ref, LorafleetError.from_dict(answer["error"]))

    async def _warm_one(self, ref: dict[str, str]) -> dict[str, Any]:
        for wait_s in WAITS_S if ref["name"] in self._config.pinned_adapters else ():
            answer = await self._load(ref)
            if answer.get("error", {}).get("class") != Unavailable.__name__:
                return answer
            await asyncio.sleep(wait_s)
        return await self._load(ref)

    async def generate(self, request: dict[str, Any], route: str) -> AsyncGenerator[bytes, None]:
        """`route`: why the router chose this replica. Closing the stream aborts the request."""
        adapter = request["adapter"]["name"] if request["adapter"] else BASE
        times = RequestTimes(time.monotonic(), unfinished=request["params"]["n"])
        self._books.arrived(adapter, route, times.arrived)
        code = None
        try:
            if route == "resident" and not await self._holds(adapter):
                self._books.misrouted()
            deltas = self._client.generate(decode_request(request), self._settings.stream_interval_s)
            async with aclosing(deltas) as stream:
                async for items in stream:
                    if times.first is None:
                        self._books.first_token(adapter, time.monotonic() - times.arrived)
                        if request["is_traced"]:
                            epoch = time.time() - time.monotonic()
                            items = placed(items, self._replica_id, route, epoch)
                    times.saw(items, time.monotonic())
                    yield encode_deltas(items)
        except LorafleetError as error:
            code = error.code or "error"
            self._tell_if_refused(request["adapter"], error)
            yield encode_error(error)
        except Exception:
            code = INTERNAL_ERROR  # ours: its client is told no more than that
            raise
        finally:
            self._books.finished(adapter, times, is_error=code is not None)
            self._books.ended(adapter, time.monotonic(), code)

    async def load_adapter(self, ref: dict[str, str]) -> dict[str, Any]:
        (answer,) = await self._load_call([ref])
        return answer

    async def prefetch(self, ref: dict[str, str]) -> None:
        """A request for it waits in a router, and is to come here. Nobody hears how that ends."""
        with suppress(EngineDead):
            await self._client.prefetch(decode_ref(ref))

    async def unload_adapter(self, name: str) -> dict[str, Any]:
        self._books.forget(name, time.monotonic())  # first: it may be loaded again before the answer
        return await to_answer(self._client.unload_adapter(name))

    async def pin_adapter(self, name: str, pinned: bool) -> dict[str, Any]:
        call = self._client.pin_adapter if pinned else self._client.unpin_adapter
        return await to_answer(call(name))

    async def facts(self) -> dict[str, Any]:
        return {"max_model_len": self._client.facts.max_model_len}

    async def stats(self, names_all: bool = False) -> dict[str, Any]:
        """See `metrics.py`. `names_all`: adapters beyond the bound too."""
        stats = self._books.merge_into(await self._client.stats(), names_all)
        return {"replica": self._replica_id, **stats}

    async def record_routing_stats(self) -> dict[str, Any]:
        return routing_stats(await self._client.stats(), self._books, time.monotonic())

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {
            "max_num_seqs": self._config.max_num_seqs,
            "max_adapters": self._config.max_adapters,
            "max_requests": max_requests(self._config),
        }

    async def scaling(self, wanted: int | None) -> dict[str, Any]:
        """Tells its load, see `router.autoscaling`, and is told how many replicas the fleet should have."""
        now = time.monotonic()
        if wanted is not None:
            self._wanted = wanted, now
        return encode_load(await self._client.stats(), self._books.wanted(now), self._replica_id)

    async def take_over(self, refs: dict[str, list[dict[str, str]]]) -> dict[str, Any]:
        """`refs`: replica id -> adapters; load ours, because another replica may go."""
        answers = await self._load_call(
            ref
            for ref in refs.get(self._replica_id, ())
            if not self._books.was_unloaded(ref["name"], time.monotonic())  # while those before it were read
        )
        return {"errors": [answer["error"] for answer in answers if "error" in answer]}

    async def record_autoscaling_stats(self) -> dict[str, int]:
        if self._wanted is None or time.monotonic() - self._wanted[1] > TOLD_FOR_S:
            return {}
        return {WANTED: self._wanted[0]}

    async def check_health(self) -> None:
        if not self._client.is_alive:
            raise EngineDead("the engine process ended")

    async def _load_call(self, refs: Iterable[dict[str, str]]) -> list[dict[str, Any]]:
        """One after another. One call too many is refused: it would wait in a place of other calls."""
        if self._num_load_calls == LOAD_CALLS:
            busy = Unavailable("the replica is loading many adapters", retry_after_s=1.0)
            return [{"error": busy.to_dict()} for _ in refs]
        self._num_load_calls += 1
        try:
            return [await self._load(ref) for ref in refs]
        finally:
            self._num_load_calls -= 1

    async def _load(self, ref: dict[str, str]) -> dict[str, Any]:
        self._books.loaded(ref["name"])
        return await to_answer(self._client.load_adapter(decode_ref(ref)))

    async def _holds(self, adapter: str) -> bool:
        """In the pool, as the engine told last."""
        adapters = (await self._client.stats()).get("adapters", {})
        return bool(adapters.get(adapter, {}).get("tier") == "hbm")

    def _tell_if_refused(self, ref: dict[str, str], error: LorafleetError) -> None:
        if isinstance(error, AdapterRefused):
            self._on_refused(ref, error)

    async def _exit_with_the_engine(self) -> None:
        """Serve would need seconds to notice; a dead actor is replaced, and its clients told, at once."""
        await self._client.wait_for_death()
        logger.error("the engine process ended; so does its replica")
        os._exit(1)
