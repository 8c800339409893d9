"""An ingress replica's copy of the catalog. Names resolve here, without a call to anybody."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Protocol

from deployments.service import AdapterRecord
from engine.request import AdapterRef
from router.catalog import Entry, Snapshot, refuse_while_loading
from router.catalog_upkeep import Status

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5


class CatalogService(Protocol):
    """`router.catalog.Catalog`, wherever it runs. Raises Unavailable while it cannot be reached."""

    async def lookup(self, name: str) -> AdapterRef: ...

    async def template(self, ref: AdapterRef) -> str | None: ...

    async def load(self, name: str, uri: str, may_replace: bool) -> None: ...

    async def remove(self, name: str) -> None: ...

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot: ...


class CatalogView:
    """An AdapterCatalog. A name it has not heard of yet is asked for; what it knows survives the catalog."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog
        self._name = uuid.uuid4().hex
        self._epoch = ""
        self._version = -1
        self._entries: dict[str, Entry] = {}
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
            self._entries = {entry.ref.name: entry for entry in snapshot.entries}
            known = {entry.ref for entry in snapshot.entries}
            self._templates = {ref: text for ref, text in self._templates.items() if ref in known}

    async def resolve(self, name: str) -> AdapterRecord:
        entry = self._entries.get(name)
        if entry is None:
            entry = Entry(await self._catalog.lookup(name), Status())
        refuse_while_loading(entry)
        if entry.ref not in self._templates:
            self._templates[entry.ref] = await self._catalog.template(entry.ref)
        return _record(entry, self._templates[entry.ref])

    async def list(self) -> list[AdapterRecord]:
        return [_record(entry, self._templates.get(entry.ref)) for entry in self._entries.values()]

    async def load(self, name: str, uri: str, *, replace: bool) -> None:
        await self._catalog.load(name, uri, replace)

    async def unload(self, name: str) -> None:
        await self._catalog.remove(name)


def _record(entry: Entry, chat_template: str | None) -> AdapterRecord:
    # the last part only: clients need not know our directories and buckets
    root = entry.ref.uri.rstrip("/").rpartition("/")[2]
    return AdapterRecord(entry.ref, chat_template, root, entry.status.state, entry.status.reason)
