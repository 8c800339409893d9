"""The engine replica as Ray Serve starts and stops it. Everything else is `engine_replica.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deployments.engine_replica import WAITS_S, EngineReplica, ReplicaSettings
from deployments.rank_actors import start_ranks
from deployments.wire import from_answer
from engine.config import EngineConfig
from engine.errors import AdapterRefused, Unavailable
from engine.heap import keep_what_is_there
from engine.wire import decode_ref


class EngineDeployment(EngineReplica):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: EngineConfig, settings: ReplicaSettings, catalog: Any
    ) -> None:
        """`catalog`: its handle. What it wants on every replica is loaded before this one is ready."""

        def tell_catalog(ref: dict[str, str], error: AdapterRefused) -> None:
            # not waited for: a request's end must not depend on it, and the next one tells it again
            catalog.call.remote("refused", decode_ref(ref), error)

        if settings.has_rank_actors:
            engine, self._ranks = start_ranks(engine)
        replica_id = serve.get_replica_context().replica_id.unique_id
        super().__init__(engine, settings, replica_id, tell_catalog)
        await self.start()
        await self.warm(await _preloaded(catalog, engine.pinned_adapters))
        keep_what_is_there()

    async def __del__(self) -> None:
        # Serve awaits this when the replica's streams have ended or its grace period is over
        await self.stop()


async def _preloaded(catalog: Any, pinned: tuple[str, ...]) -> list[dict[str, str]]:
    """Waits for a catalog that is on its way back, and while it cannot tell where pinned adapters are."""
    for wait_s in WAITS_S:
        try:
            refs: list[dict[str, str]] = from_answer(await catalog.preloaded.remote(pinned))
        except (RayActorError, RayServeException, Unavailable):
            await asyncio.sleep(wait_s)
        else:
            return refs
    raise Unavailable("the catalog cannot tell which adapters are wanted")
