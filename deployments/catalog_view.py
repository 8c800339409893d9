"""An ingress replica's copy of the catalog. Names resolve here, without a call to anybody."""

from __future__ import annotations

import asyncio
import logging
import uuid
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Protocol

from deployments.service import AdapterRecord, CanaryRecord, CatalogFacts
from engine.errors import LorafleetError, Unavailable
from engine.request import AdapterRef
from router.catalog_entry import Entry, Snapshot, refuse_while_loading, shared_name
from router.catalog_upkeep import Status

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5


class CatalogService(Protocol):
    """`router.catalog.Catalog`, wherever it runs. Raises Unavailable while it cannot be reached."""

    async def lookup(self, name: str) -> AdapterRef: ...

    async def template(self, ref: AdapterRef) -> str | None: ...

    async def load(self, name: str, uri: str, may_replace: bool) -> None: ...

    async def load_canary(self, name: str, uri: str, weight: float) -> None: ...

    async def remove(self, name: str) -> None: ...

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot: ...


class CatalogView:
    """An AdapterCatalog. A name it has not heard of yet is asked for; what it knows survives the catalog."""

    def __init__(self, catalog: CatalogService) -> None:
        self._catalog = catalog
        self._name = uuid.uuid4().hex
        self._epoch = ""
        self._version = -1
        self._kept = "unknown"
        self._entries: Mapping[str, Entry] = {}
        self._names: list[str] = []  # of the entries, sorted
        self._templates: dict[AdapterRef, str | None] = {}

    async def run(self) -> None:
        """Follow the catalog until cancelled."""
        while True:
            try:
                self._take(await self._catalog.wait(self._name, self._epoch, self._version))
            except Unavailable:  # its process may be on its way back
                logger.warning("the catalog does not answer; what was known stays")
                await asyncio.sleep(RECONNECT_S)
            except Exception:
                logger.exception("the catalog cannot be followed; what was known stays")
                await asyncio.sleep(RECONNECT_S)

    async def resolve(self, name: str) -> AdapterRecord:
        entry = self._entries.get(name)
        if entry is None:
            entry = Entry(await self._catalog.lookup(name), Status())
        refuse_while_loading(entry)
        if entry.refusal is not None:
            return _record(entry, {})
        # those of this entry: what is remembered may be for a newer one by the time that both are here
        templates = {entry.ref: await self._template(entry.ref)}
        if entry.canary is not None:
            try:
                templates[entry.canary.ref] = await self._template(entry.canary.ref)
            except LorafleetError:  # it leaves all requests to the version that can be had
                entry = replace(entry, canary=None)
        return _record(entry, templates)

    async def list(self, prefix: str, after: str, limit: int) -> list[AdapterRecord]:
        return [_record(self._entries[name], {}) for name in islice(self._names_from(prefix, after), limit)]

    def facts(self) -> CatalogFacts:
        states = Counter[str](entry.status.state for entry in self._entries.values())
        return CatalogFacts(self._kept, states)

    async def load(self, name: str, uri: str, *, replace: bool) -> None:
        await self._catalog.load(name, uri, replace)

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        await self._catalog.load_canary(name, uri, weight)

    async def unload(self, name: str) -> None:
        await self._catalog.remove(name)

    async def _template(self, ref: AdapterRef) -> str | None:
        if ref not in self._templates:
            self._templates[ref] = await self._catalog.template(ref)
        return self._templates[ref]

    def _take(self, snapshot: Snapshot) -> None:
        entries = snapshot.applied_to(self._entries)
        self._epoch, self._version, self._kept = snapshot.epoch, snapshot.version, snapshot.kept
        if entries is self._entries:
            return
        self._entries, self._names = entries, list(entries)
        self._templates = {ref: text for ref, text in self._templates.items() if self._has(ref)}

    def _has(self, ref: AdapterRef) -> bool:
        entry = self._entries.get(shared_name(ref.name))
        return entry is not None and ref in entry.refs()

    def _names_from(self, prefix: str, after: str) -> Iterator[str]:
        first = max(bisect_left(self._names, prefix), bisect_right(self._names, after))
        for index in range(first, len(self._names)):
            if not self._names[index].startswith(prefix):
                return
            yield self._names[index]


def _record(entry: Entry, templates: Mapping[AdapterRef, str | None]) -> AdapterRecord:
    canary = None
    if entry.canary is not None:
        ref = entry.canary.ref
        canary = CanaryRecord(AdapterRecord(ref, templates.get(ref), _root(ref)), entry.canary.weight)
    return AdapterRecord(
        entry.ref,
        templates.get(entry.ref),
        _root(entry.ref),
        entry.status.state,
        entry.status.reason,
        canary,
        entry.refusal.error() if entry.refusal else None,
    )


def _root(ref: AdapterRef) -> str:
    # the last part only: clients need not know our directories and buckets
    return ref.uri.rstrip("/").rpartition("/")[2]
