"""The engine replica as Ray Serve starts and stops it. Everything else is `engine_replica.py`."""

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.engine_replica import EngineReplica, ReplicaSettings
from engine.config import EngineConfig


class EngineDeployment(EngineReplica):
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, engine: EngineConfig, settings: ReplicaSettings, catalog: Any
    ) -> None:
        """`catalog`: its handle. What it wants on every replica is loaded before this one is ready."""
        super().__init__(engine, settings, serve.get_replica_context().replica_id.unique_id)
        await self.start()
        await self.warm(await catalog.preloaded.remote(engine.pinned_adapters))

    async def __del__(self) -> None:
        # Serve awaits this when the replica's streams have ended or its grace period is over
        await self.stop()
