"""The catalog as a Serve deployment of one replica, and the other end of its handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deployments.wire import from_answer, to_answer
from engine.adapters.source import describe, open_source, read_chat_template
from engine.errors import Unavailable
from engine.request import AdapterRef
from engine.wire import encode_ref
from router.catalog import Catalog, Snapshot
from router.catalog_state import CatalogState

CALL_TIMEOUT_S = 20.0  # above the deadlines of the source and of the long poll


class CatalogDeployment:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, source_uri: str | None, static: Mapping[str, str], state_file: Path | None
    ) -> None:
        source = await asyncio.to_thread(open_source, source_uri) if source_uri else None
        self._catalog = Catalog(source, static, describe, read_chat_template, CatalogState(state_file))
        await self._catalog.refresh()
        self._following = asyncio.create_task(self._catalog.run())

    async def call(self, method: str, *args: Any) -> dict[str, Any]:
        """One of the methods of `CatalogService`."""
        return await to_answer(getattr(self._catalog, method)(*args))

    async def preloaded(self) -> list[dict[str, str]]:
        return [encode_ref(ref) for ref in self._catalog.preloaded()]

    async def check_health(self) -> None:
        if self._following.done():
            await self._following


class CatalogHandle:
    """A CatalogService over a deployment handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def lookup(self, name: str) -> AdapterRef:
        ref: AdapterRef = await self._call("lookup", name)
        return ref

    async def template(self, ref: AdapterRef) -> str | None:
        text: str | None = await self._call("template", ref)
        return text

    async def propose(self, name: str, uri: str, may_replace: bool) -> AdapterRef:
        ref: AdapterRef = await self._call("propose", name, uri, may_replace)
        return ref

    async def commit(self, ref: AdapterRef, may_replace: bool) -> None:
        await self._call("commit", ref, may_replace)

    async def remove(self, name: str) -> AdapterRef:
        ref: AdapterRef = await self._call("remove", name)
        return ref

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot:
        snapshot: Snapshot = await self._call("wait", view, epoch, version)
        return snapshot

    async def _call(self, method: str, *args: Any) -> Any:
        call: Awaitable[dict[str, Any]] = self._handle.call.remote(method, *args)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await call
        except (TimeoutError, RayActorError, RayServeException) as error:
            raise Unavailable("the catalog does not answer", retry_after_s=1.0) from error
        return from_answer(answer)
