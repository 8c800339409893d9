"""A source, replicas and a catalog over them for its tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from engine.adapters.source import AdapterListing
from engine.errors import (
    InvalidRequest,
    LorafleetError,
    ModelNotFound,
    Unavailable,
)
from engine.request import AdapterRef
from router.catalog import Catalog
from router.catalog_state import CatalogState
from router.catalog_store import FileStore

DOWN = Unavailable("no answer", retry_after_s=2.0)


class FakeSource:
    """Adapters by name, with their versions."""

    def __init__(self, **versions: str) -> None:
        self.versions = versions
        self.failure: LorafleetError | None = None
        self.gate: threading.Event | None = None
        self.finds: list[str] = []

    def list_adapters(self) -> list[AdapterListing]:
        self._answer()
        return [self._listing(name) for name in sorted(self.versions)]

    def find(self, name: str) -> AdapterListing:
        self.finds.append(name)
        self._answer()
        if "/" in name:
            raise InvalidRequest("no name", param="model")
        if name not in self.versions:
            raise ModelNotFound("none")
        return self._listing(name)

    def describe(self, uri: str) -> AdapterListing:
        return self.find(uri.removeprefix("src/"))

    def _answer(self) -> None:
        if self.gate is not None:
            self.gate.wait(5)
        if self.failure is not None:
            raise self.failure

    def _listing(self, name: str) -> AdapterListing:
        return AdapterListing(name, f"src/{name}", self.versions[name], ())


class FakeFleet:
    """What the replicas were told; `refusals` by name."""

    def __init__(self) -> None:
        self.asked: list[AdapterRef] = []
        self.loaded: list[AdapterRef] = []
        self.unloaded: list[str] = []
        self.refusals: dict[str, LorafleetError] = {}
        self.gate: asyncio.Event | None = None
        self.failure: LorafleetError | None = None

    async def load_adapter(self, ref: AdapterRef) -> None:
        self.asked.append(ref)
        if self.gate is not None:
            await self.gate.wait()
        if ref.name in self.refusals:
            raise self.refusals[ref.name]
        self.loaded.append(ref)

    async def unload_adapter(self, name: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.unloaded.append(name)


def build(
    source: FakeSource,
    path: Path | None = None,
    fleet: FakeFleet | None = None,
    max_kept: int = 9,
    **static: str,
) -> Catalog:
    return Catalog(
        source,
        static,
        source.describe,
        lambda uri: f"template of {uri}",
        CatalogState(FileStore(path) if path else None),
        fleet or FakeFleet(),
        max_kept,
    )


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=20))


async def names(catalog: Catalog) -> list[str]:
    return [entry.ref.name for entry in (await catalog.wait("test", "", 0)).entries]


async def states(catalog: Catalog) -> dict[str, tuple[str, str | None]]:
    entries = (await catalog.wait("test", "", 0)).entries
    return {entry.ref.name: (entry.status.state, entry.status.reason) for entry in entries}
