"""The desired adapters: found in the source, named by the configuration, loaded at run time. One per cluster.

Knows nothing of Ray, HTTP or engines. A refresh in the background follows the source; while the source is
down, what was known stays. A name that nobody has listed yet is looked up in the source at once, so that an
adapter can be used right after its upload. Changes go out through `wait`, a long poll that says at the same
time what a view has seen already: `commit` and `remove` return when every live view has seen them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from engine.adapters.source import AdapterListing, AdapterSource
from engine.errors import Conflict, InvalidRequest, LorafleetError, ModelNotFound, Unavailable
from engine.request import AdapterRef
from router.catalog_state import CatalogState

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
NEGATIVE_S = 5.0  # how long a name that the source does not have stays unknown
MAX_PROBES = 8  # lookups of unlisted names at a time: junk names must not flood the source
MAX_NEGATIVE = 4096
POLL_S = 5.0
SEEN_TIMEOUT_S = 2.0  # a view that does not answer for so long is waited for no more


class Describe(Protocol):
    def __call__(self, uri: str) -> AdapterListing: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: str  # versions of two catalogs do not compare
    version: int
    refs: tuple[AdapterRef, ...]  # by name


@dataclass(slots=True)
class _View:
    version: int
    heard: float


class Catalog:
    def __init__(
        self,
        source: AdapterSource | None,
        static: Mapping[str, str],
        describe: Describe,
        read_template: Callable[[str], str | None],
        state: CatalogState,
    ) -> None:
        """`static`: name -> URI. `describe` and `read_template` block and take the URI of one adapter."""
        self._source = source
        self._describe = describe
        self._read_template = read_template
        self._state = state
        self._static = {name: AdapterRef(name, uri) for name, uri in static.items()}
        self._discovered: dict[str, AdapterRef] = {}
        self._unknown: dict[str, float] = {}  # name -> until when
        self._templates: dict[AdapterRef, str | None] = {}
        self._probes = 0
        self._listed_at = -float("inf")
        self._epoch = uuid.uuid4().hex
        self._version = 0
        self._refs = self._merged()
        self._last_error: str | None = None
        self._changed = asyncio.Condition()
        self._views: dict[str, _View] = {}

    async def run(self) -> None:
        """Follow the source until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        try:
            if self._source is not None:
                listings = await asyncio.to_thread(self._source.list_adapters)
                self._discovered = {item.name: _ref(item.name, item) for item in listings}
                self._listed_at = time.monotonic()
            await self._describe_all(self._static)
            await self._describe_all(self._state.loaded)
            error = None
        except LorafleetError as raised:
            error = raised.code
        if error is not None and error != self._last_error:
            logger.warning("the adapter source does not answer (%s); what was known stays", error)
        self._last_error = error
        await self._publish()

    async def lookup(self, name: str) -> AdapterRef:
        """Raises ModelNotFound; Unavailable or AccessDenied if the source cannot tell."""
        if name in self._refs:
            return self._refs[name]
        if self._source is None or name in self._state.removed or self._is_known_unknown(name):
            raise ModelNotFound(f"no adapter {name!r}")
        if self._probes >= MAX_PROBES:
            if time.monotonic() - self._listed_at < 2 * REFRESH_S:
                raise ModelNotFound(f"no adapter {name!r}")
            raise Unavailable("the adapter source is busy", retry_after_s=1.0)
        self._probes += 1
        try:
            listing = await asyncio.to_thread(self._source.find, name)
        except (ModelNotFound, InvalidRequest):
            self._remember_unknown(name)
            raise ModelNotFound(f"no adapter {name!r}") from None
        finally:
            self._probes -= 1
        self._discovered[name] = _ref(name, listing)
        await self._publish()
        return await self.lookup(name)

    async def template(self, ref: AdapterRef) -> str | None:
        """The adapter's own chat template. Raises AdapterRefused, ModelNotFound or Unavailable."""
        if ref not in self._templates:
            self._templates[ref] = await asyncio.to_thread(self._read_template, ref.uri)
        return self._templates[ref]

    async def propose(self, name: str, uri: str, may_replace: bool) -> AdapterRef:
        """What `commit` would add. Raises Conflict, InvalidRequest or what `describe` raises."""
        if name.startswith("_"):
            raise InvalidRequest("an adapter's name does not begin with an underscore", param="lora_name")
        self._check_free(name, may_replace)
        return _ref(name, await asyncio.to_thread(self._describe, uri))

    async def commit(self, ref: AdapterRef, may_replace: bool) -> None:
        """Desired from now on, and after a restart. Raises Conflict."""
        self._check_free(ref.name, may_replace)
        await self._state.add(ref)
        await self._publish()
        await self._until_seen()

    async def remove(self, name: str) -> AdapterRef:
        """Desired no more, even if the source has it, until it is loaded again. Raises ModelNotFound."""
        ref = self._refs.get(name)
        if ref is None:
            raise ModelNotFound(f"no adapter {name!r}")
        await self._state.remove(name, hide=name in self._static or name in self._discovered)
        await self._publish()
        await self._until_seen()
        return ref

    def preloaded(self) -> list[AdapterRef]:
        """What every replica loads before it serves: adapters that somebody named."""
        named = {**self._static, **self._state.loaded}
        return [ref for name, ref in named.items() if name in self._refs]

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot:
        """The next state after the one that the view names as seen, or the same one after `POLL_S`."""
        seen = version if epoch == self._epoch else -1
        self._views[view] = _View(seen, time.monotonic())
        async with self._changed:
            self._changed.notify_all()  # somebody may wait for this view
            try:
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait_for(lambda: self._version > seen)
            except TimeoutError:
                pass
        return Snapshot(self._epoch, self._version, tuple(self._refs[name] for name in sorted(self._refs)))

    def _check_free(self, name: str, may_replace: bool) -> None:
        if name in self._refs and not may_replace:
            raise Conflict(f"there is an adapter {name!r} already", param="lora_name")

    async def _describe_all(self, refs: dict[str, AdapterRef]) -> None:
        """Find out the version of those that have none yet. A missing one stays: its requests will tell."""
        for name, ref in list(refs.items()):
            if not ref.version:
                try:
                    listing = await asyncio.to_thread(self._describe, ref.uri)
                except (ModelNotFound, InvalidRequest):
                    continue
                if refs.get(name) is ref:  # it may have been unloaded meanwhile
                    refs[name] = replace(ref, version=listing.version)

    async def _publish(self) -> None:
        refs = self._merged()
        if refs == self._refs:
            return
        self._refs = refs
        self._version += 1
        desired = set(refs.values())
        self._templates = {ref: text for ref, text in self._templates.items() if ref in desired}
        async with self._changed:
            self._changed.notify_all()

    def _merged(self) -> dict[str, AdapterRef]:
        refs = {**self._discovered, **self._static, **self._state.loaded}
        return {name: ref for name, ref in refs.items() if name not in self._state.removed}

    async def _until_seen(self) -> None:
        version = self._version
        async with self._changed:
            try:
                async with asyncio.timeout(SEEN_TIMEOUT_S):
                    await self._changed.wait_for(lambda: self._oldest_seen() >= version)
            except TimeoutError:
                logger.warning("a view of the catalog does not answer")

    def _oldest_seen(self) -> int:
        dead_before = time.monotonic() - POLL_S - SEEN_TIMEOUT_S
        self._views = {name: view for name, view in self._views.items() if view.heard > dead_before}
        return min((view.version for view in self._views.values()), default=self._version)

    def _is_known_unknown(self, name: str) -> bool:
        return self._unknown.get(name, 0.0) > time.monotonic()

    def _remember_unknown(self, name: str) -> None:
        self._unknown.pop(name, None)
        self._unknown[name] = time.monotonic() + NEGATIVE_S
        if len(self._unknown) > MAX_NEGATIVE:
            del self._unknown[next(iter(self._unknown))]


def _ref(name: str, listing: AdapterListing) -> AdapterRef:
    return AdapterRef(name, listing.uri, listing.version)
