"""An ingress replica's copy of the catalog. Names resolve here, without a call to anybody."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Protocol

from deployments.service import AdapterRecord, EngineService
from engine.request import AdapterRef
from router.catalog import Snapshot

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5


class CatalogService(Protocol):
    """`router.catalog.Catalog`, wherever it runs. Raises Unavailable while it cannot be reached."""

    async def lookup(self, name: str) -> AdapterRef: ...

    async def template(self, ref: AdapterRef) -> str | None: ...

    async def propose(self, name: str, uri: str, may_replace: bool) -> AdapterRef: ...

    async def commit(self, ref: AdapterRef, may_replace: bool) -> None: ...

    async def remove(self, name: str) -> AdapterRef: ...

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot: ...


class CatalogView:
    """An AdapterCatalog. A name it has not heard of yet is asked for; what it knows survives the catalog."""

    def __init__(self, catalog: CatalogService, service: EngineService) -> None:
        self._catalog = catalog
        self._service = service
        self._name = uuid.uuid4().hex
        self._epoch = ""
        self._version = -1
        self._refs: dict[str, AdapterRef] = {}
        self._templates: dict[AdapterRef, str | None] = {}

    async def run(self) -> None:
        """Follow the catalog until cancelled."""
        while True:
            try:
                snapshot = await self._catalog.wait(self._name, self._epoch, self._version)
            except Exception:
                # its process may be on its way back; whatever the reason, what is known still serves
                logger.warning("the catalog does not answer; what was known stays")
                await asyncio.sleep(RECONNECT_S)
                continue
            self._epoch, self._version = snapshot.epoch, snapshot.version
            self._refs = {ref.name: ref for ref in snapshot.refs}
            self._templates = {r: text for r, text in self._templates.items() if self._refs.get(r.name) == r}

    async def resolve(self, name: str) -> AdapterRecord:
        ref = self._refs.get(name) or await self._catalog.lookup(name)
        if ref not in self._templates:
            self._templates[ref] = await self._catalog.template(ref)
        return _record(ref, self._templates[ref])

    async def list(self) -> list[AdapterRecord]:
        return [_record(ref, self._templates.get(ref)) for ref in self._refs.values()]

    async def load(self, name: str, uri: str, *, replace: bool) -> None:
        ref = await self._catalog.propose(name, uri, replace)
        await self._service.load_adapter(ref)
        await self._catalog.commit(ref, replace)

    async def unload(self, name: str) -> None:
        await self._catalog.remove(name)
        await self._service.unload_adapter(name)


def _record(ref: AdapterRef, chat_template: str | None) -> AdapterRecord:
    # the last part only: clients need not know our directories and buckets
    return AdapterRecord(ref, chat_template, root=ref.uri.rstrip("/").rpartition("/")[2])
