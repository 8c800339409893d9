"""The catalog as a Serve deployment of one replica, and the other end of its handle."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deployments.fleet_scaler import FleetScaler
from deployments.fleet_service import Replicas
from deployments.wire import from_answer, to_answer
from engine.adapters.source import describe, open_source, read_chat_template
from engine.errors import Unavailable
from engine.request import AdapterRef
from engine.wire import encode_ref
from router.autoscaling import Bounds
from router.catalog import Catalog
from router.catalog_entry import Snapshot
from router.catalog_store import open_state

CALL_TIMEOUT_S = 20.0  # above the deadlines of the source and of the long poll


@dataclass(frozen=True, slots=True)
class CatalogSettings:
    source_uri: str | None
    static: dict[str, str]  # name -> URI
    state_file: Path | None  # None: beside the adapters of the source
    engine_deployment: str  # its name
    load_timeout_s: float
    max_kept: int  # named adapters that every replica has
    scaling: Bounds | None = None


class CatalogDeployment:
    async def __init__(self, settings: CatalogSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        source = await asyncio.to_thread(open_source, settings.source_uri) if settings.source_uri else None
        state = open_state(settings.source_uri, settings.state_file)
        application = serve.get_replica_context().app_name

        @functools.cache
        def engines() -> Any:
            # not before they are called: they wait for this deployment when they start
            return serve.get_deployment_handle(settings.engine_deployment, application)

        fleet = Replicas(engines, settings.load_timeout_s)
        self._catalog = Catalog(
            source, settings.static, describe, read_chat_template, state, fleet, settings.max_kept
        )
        await self._catalog.refresh()
        self._following = [asyncio.create_task(self._catalog.run())]
        if settings.scaling is not None:
            scaler = FleetScaler(settings.scaling, fleet.broadcast, self._catalog.lookup)
            self._following.append(asyncio.create_task(scaler.run()))

    async def call(self, method: str, *args: Any) -> dict[str, Any]:
        """One of the methods of `CatalogService`."""
        return await to_answer(getattr(self._catalog, method)(*args))

    async def preloaded(self, pinned: tuple[str, ...]) -> dict[str, Any]:
        """The references of `Catalog.preloaded`, as replicas load them."""

        async def refs() -> list[dict[str, str]]:
            return [encode_ref(ref) for ref in await self._catalog.preloaded(pinned)]

        return await to_answer(refs())

    async def check_health(self) -> None:
        for task in self._following:
            if task.done():
                await task


class CatalogHandle:
    """A CatalogService over a deployment handle."""

    def __init__(self, handle: Any, load_timeout_s: float) -> None:
        self._handle = handle
        self._load_timeout_s = load_timeout_s

    async def lookup(self, name: str) -> AdapterRef:
        ref: AdapterRef = await self._call("lookup", name)
        return ref

    async def template(self, ref: AdapterRef) -> str | None:
        text: str | None = await self._call("template", ref)
        return text

    async def load(self, name: str, uri: str, may_replace: bool) -> None:
        await self._call("load", name, uri, may_replace, timeout_s=CALL_TIMEOUT_S + self._load_timeout_s)

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        await self._call("load_canary", name, uri, weight, timeout_s=CALL_TIMEOUT_S + self._load_timeout_s)

    async def remove(self, name: str) -> None:
        await self._call("remove", name)

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot:
        snapshot: Snapshot = await self._call("wait", view, epoch, version)
        return snapshot

    async def _call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        call: Awaitable[dict[str, Any]] = self._handle.call.remote(method, *args)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await call
        except (TimeoutError, RayActorError, RayServeException) as error:
            raise Unavailable("the catalog does not answer", retry_after_s=1.0) from error
        return from_answer(answer)
