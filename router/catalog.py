"""The desired adapters: found in the source, named by the configuration, loaded at run time. One per cluster.

Knows nothing of Ray, HTTP or engines. It follows the source in the background; while the source is down, what
was known stays. Adapters that somebody named are kept on the replicas in their newest version, and tried
again, less and less often, while that fails. A name that nobody has listed yet is looked up in the source at
once, so that an adapter can be used right after its upload. What an engine refuses is shown so and not asked
of any engine again, until there are other bytes at its place. Changes go out through `wait`, a long poll that
says at the same time what a view has seen already: `load` and `remove` return when every live view has seen
them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol

from engine.adapters.names import is_reserved
from engine.adapters.source import AdapterListing, AdapterSource
from engine.errors import (
    AdapterRefused,
    Conflict,
    InvalidRequest,
    LorafleetError,
    ModelNotFound,
    Unavailable,
)
from engine.request import AdapterRef
from router.catalog_departures import Departures
from router.catalog_entry import (
    Entry,
    Snapshot,
    canary_name,
    is_loading,
    refuse_while_loading,
    shared_name,
)
from router.catalog_lookup import SourceLookup
from router.catalog_merge import merged, named_adapters
from router.catalog_refusals import Refusals
from router.catalog_state import CatalogState
from router.catalog_templates import Templates
from router.catalog_upkeep import Upkeep, retry_delay_s
from router.catalog_views import Views
from router.limited_calls import LimitedCalls

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
UPKEEP_S = 0.5
MAX_UPKEEPS = 8  # adapters looked at at a time
NO_REPLICA = "no_replica"  # code of the error of a fleet that has none


class Describe(Protocol):
    def __call__(self, uri: str) -> AdapterListing: ...


class Fleet(Protocol):
    """The replicas."""

    async def load_adapter(self, ref: AdapterRef) -> Any:
        """On all of them. Raises LorafleetError, with the code NO_REPLICA if there is none."""

    async def unload_adapter(self, name: str) -> None: ...


class Catalog:
    def __init__(
        self,
        source: AdapterSource | None,
        static: Mapping[str, str],
        describe: Describe,
        read_template: Callable[[str], str | None],
        state: CatalogState,
        fleet: Fleet,
        max_kept: int,
    ) -> None:
        """`static`: name -> URI. `describe` and `read_template` block and take the URI of one adapter.

        `max_kept`: so many named adapters are kept on the replicas; the others are read when asked for.
        """
        self._source = source
        self._lookup = SourceLookup(source) if source else None
        self._describe = describe
        self._state = state
        self._fleet = fleet
        self._max_kept = max_kept
        self._static = dict(static)
        self._discovered: dict[str, AdapterRef] = {}
        self._loading: dict[str, str] = {}  # new name -> URI, while it is loaded at run time
        self._upkeep = Upkeep()
        self._looks = LimitedCalls[str](MAX_UPKEEPS)
        self._farewells = LimitedCalls[str](MAX_UPKEEPS)
        self._has_news = False  # of the upkeep, to be published
        self._refusals = Refusals()
        self._departures = Departures()
        self._templates = Templates(read_template)
        self._listed_at = -float("inf")
        self._refresh_failures = 0
        self._has_read = False  # source and state, once at least
        self._entries = self._merged()
        self._views = Views()

    async def run(self) -> None:
        """Follow source and state, keep what is named on the replicas; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refresh_forever())
            tasks.create_task(self._keep_up_forever())

    async def refresh(self) -> None:
        """See what source and state hold now. What was known stays if they do not answer."""
        errors = [
            str(error) for part in (self._list, self._state.refresh) if (error := await _error_of(part()))
        ]
        if errors and not self._refresh_failures:
            logger.warning("%s; what was known stays", "; ".join(errors))
        self._refresh_failures = self._refresh_failures + 1 if errors else 0
        if not errors and not self._has_read:
            self._has_read = True
            self._views.renew()
        await self._publish()

    async def keep_up(self) -> None:
        """Look at the named adapters whose time has come, and at those that are gone, once.

        What an earlier call still looks at is left to that: one that is slow holds up no other.
        """
        self._upkeep.want(self._named())
        now = time.monotonic()
        due = dict(self._upkeep.due(now))
        await self._looks.run(due, lambda name: self._keep(name, due[name]))
        await self._publish_news()
        await self._farewells.run(self._departures.due(now), self._let_go)

    async def lookup(self, name: str) -> AdapterRef:
        """Raises ModelNotFound or AdapterRefused; Unavailable or AccessDenied while nobody can tell, or while
        it is loaded.
        """
        if name in self._entries:
            entry = self._entries[name]
            refuse_while_loading(entry)
            if entry.refusal is not None:
                raise entry.refusal.error()
            return entry.ref
        if self._lookup is None or name in self._state.desired.removed:
            raise ModelNotFound(f"no adapter {name!r}")
        found = _ref(name, await self._lookup.find(name, self._is_listed()))
        self._discovered.setdefault(name, found)  # a listing that ended meanwhile may know a newer version
        if name not in self._entries:  # else who asked with us has published it
            await self._publish()
        return await self.lookup(name)

    async def template(self, ref: AdapterRef) -> str | None:
        """The adapter's own chat template. Raises AdapterRefused, ModelNotFound or Unavailable."""
        try:
            return await self._templates.get(ref)
        except AdapterRefused as error:
            await self.refused(ref, error)
            raise

    async def refused(self, ref: AdapterRef, error: AdapterRefused) -> None:
        """An engine cannot serve what is there in that version."""
        entry = self._entries.get(shared_name(ref.name))
        if entry is not None and ref in entry.refs():
            self._refuse(ref, error)
            await self._publish()

    async def load(self, name: str, uri: str, may_replace: bool) -> None:
        """Desired from now on, and after a restart; returns when replicas have it and views know it.

        In a fleet without a replica it stays pending: who starts loads it. Raises Conflict, InvalidRequest,
        or what reading it or loading it raises: then nothing has changed.
        """
        if is_reserved(name):
            raise InvalidRequest("an adapter's name does not begin with an underscore", param="lora_name")
        if name in self._loading:
            raise is_loading(name)
        if name in self._entries and not may_replace:
            raise Conflict(f"there is an adapter {name!r} already", param="lora_name")
        before = self._entries.get(name)
        self._loading[name] = uri
        try:
            await self._publish()
            looked_at = time.monotonic()
            version = await self._described_version(uri)
            is_loaded = await self._take_up(AdapterRef(name, uri, version), before)
            self._refusals.forget(uri)
            self._note(name, uri, version, looked_at, is_loaded)
        finally:
            del self._loading[name]
            await self._publish()
        await self._views.until_seen()

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        """Another version of a name that is there, for a part of its requests; none at a weight of 0.

        It ends when `load` replaces the name. Raises as `load`, and ModelNotFound for an unknown name.
        """
        self._check_known(name)
        looked_at = time.monotonic()
        version = await self._described_version(uri)
        is_loaded = True
        if weight:
            is_loaded = await self._load_on_all(AdapterRef(canary_name(name), uri, version))
            self._refusals.forget(uri)
        self._check_known(name)  # that took a while: it may have been unloaded
        await self._state.change(lambda desired: desired.with_canary(name, uri, weight))
        self._note(canary_name(name), uri, version, looked_at, is_loaded)
        await self._publish()
        await self._views.until_seen()

    async def remove(self, name: str) -> None:
        """Desired no more, even if the source has it, until it is loaded again.

        Raises ModelNotFound; Unavailable while it is being loaded.
        """
        self._check_known(name)
        unloaded = (name, canary_name(name)) if name in self._state.desired.canaries else (name,)
        is_elsewhere = name in self._static or name in self._discovered
        await self._state.change(lambda desired: desired.without(name, hide=is_elsewhere))
        await self._publish()
        await self._views.until_seen()
        try:
            for gone in unloaded:
                await self._fleet.unload_adapter(gone)
        except Unavailable:
            # nobody can ask for it any more; it only takes room until it yields
            logger.warning("no replica has heard that adapter %s was unloaded", name)

    async def preloaded(self, pinned: tuple[str, ...] = ()) -> list[AdapterRef]:
        """What every replica loads before it serves: pinned adapters, then those that somebody named.

        Raises Unavailable or AccessDenied while nobody can tell where a pinned one is.
        """
        refs = {}
        await asyncio.gather(*(self._learn_version(name, uri) for name, uri in self._kept().items()))
        await self._publish()
        for name in pinned:
            try:
                refs[name] = await self.lookup(name)
            except (ModelNotFound, AdapterRefused) as error:
                logger.warning("pinned adapter %s: %s", name, error.message)
        kept = {name: AdapterRef(name, uri, self._upkeep.version(name)) for name, uri in self._kept().items()}
        return list({**refs, **kept}.values())

    async def wait(self, view: str, epoch: str, version: int) -> Snapshot:
        """The next state after the one that the view names as seen, or the same one after a while.

        Before source and state were read, what a view knows beside it from an earlier catalog stays.
        """
        changed = await self._views.wait(view, epoch, version)
        names = self._entries.keys() if changed is None else changed & self._entries.keys()
        return Snapshot(
            self._views.epoch,
            self._views.version,
            self._state.kept,
            is_whole=changed is None and self._has_read,
            entries=tuple(self._entries[name] for name in sorted(names)),
            gone=() if changed is None else tuple(sorted(changed - self._entries.keys())),
        )

    async def _refresh_forever(self) -> None:
        while True:
            await self.refresh()
            failures = self._refresh_failures
            await asyncio.sleep(retry_delay_s(failures) if failures else REFRESH_S)

    async def _keep_up_forever(self) -> None:
        async with asyncio.TaskGroup() as rounds:
            while True:
                rounds.create_task(self.keep_up())
                await asyncio.sleep(UPKEEP_S)
                await self._publish_news()

    async def _list(self) -> None:
        if self._source is not None:
            known = set(self._discovered)
            listings = await asyncio.to_thread(self._source.list_adapters)
            # it may have begun before what was found since was there
            found = {name: ref for name, ref in self._discovered.items() if name not in known}
            self._discovered = {item.name: _ref(item.name, item) for item in listings} | found
            self._listed_at = time.monotonic()

    def _is_listed(self) -> bool:
        """Of late: an old listing is older than what was loaded since."""
        return time.monotonic() - self._listed_at < 2 * REFRESH_S

    def _check_known(self, name: str) -> None:
        if name in self._loading:
            raise is_loading(name)
        if name not in self._entries:
            raise ModelNotFound(f"no adapter {name!r}", param="lora_name")

    async def _take_up(self, ref: AdapterRef, before: Entry | None) -> bool:
        """Have it on the replicas, if there are any, and desired, or all as it was `before`."""
        try:
            is_loaded = await self._load_on_all(ref)
            await self._state.change(lambda desired: desired.with_loaded(ref.name, ref.uri))
        except LorafleetError as error:
            if before is not None and not isinstance(error, AdapterRefused):
                with suppress(LorafleetError):
                    await self._fleet.load_adapter(before.ref)  # some replicas may have the new one
            raise
        return is_loaded

    async def _load_on_all(self, ref: AdapterRef) -> bool:
        """Whether there are replicas; who starts loads it by himself."""
        try:
            await self._fleet.load_adapter(ref)
        except LorafleetError as error:
            if error.code != NO_REPLICA:
                raise
            return False
        return True

    def _note(self, name: str, uri: str, version: str, looked_at: float, is_loaded: bool) -> None:
        """What somebody asked for at run time, and was found to be there."""
        self._upkeep.want(self._named())
        if is_loaded:
            self._upkeep.succeeded(name, uri, version, looked_at, time.monotonic())
        else:
            self._upkeep.expect(name, uri, version)

    async def _keep(self, name: str, uri: str) -> None:
        looked_at = time.monotonic()
        try:
            version = await self._version_of(uri)
            self._upkeep.described(name, uri, version)
            is_missing = self._kept().get(name) == uri and not self._upkeep.is_confirmed(name, version)
            if is_missing and not await self._keep_loaded(AdapterRef(name, uri, version)):
                self._upkeep.put_off(name, uri, time.monotonic())
                return
        except AdapterRefused as error:
            self._upkeep.failed(name, uri, error.message, looked_at, time.monotonic(), is_refused=True)
        except LorafleetError as error:
            self._upkeep.failed(name, uri, error.message, looked_at, time.monotonic())
            logger.warning("adapter %s: %s", name, error.message)
        else:
            self._upkeep.succeeded(name, uri, version, looked_at, time.monotonic())
        finally:
            self._has_news = True

    async def _let_go(self, name: str) -> None:
        """It was deleted at its source: replicas would hold it, and metrics name it, for ever."""
        with suppress(Unavailable):  # the next time
            await self._fleet.unload_adapter(name)
            self._departures.forgotten(name)

    async def _keep_loaded(self, ref: AdapterRef) -> bool:
        """As `_load_on_all`, but what was refused is not tried again."""
        if refusal := self._refusals.get(ref):
            raise refusal.error()
        try:
            return await self._load_on_all(ref)
        except AdapterRefused as error:
            self._refuse(ref, error)
            raise

    def _refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        if self._refusals.add(ref, error):
            logger.warning("adapter %s is refused: %s", ref.name, error.message)

    async def _learn_version(self, name: str, uri: str) -> None:
        if not self._upkeep.version(name):
            with suppress(LorafleetError):  # `keep_up` will tell
                self._upkeep.described(name, uri, await self._version_of(uri))

    async def _version_of(self, uri: str) -> str:
        if self._is_listed():
            for ref in self._discovered.values():
                if ref.uri == uri:
                    return ref.version  # the listing has told it already
        return await self._described_version(uri)

    async def _described_version(self, uri: str) -> str:
        """Of what is there now, which may be newer than the listing."""
        return (await asyncio.to_thread(self._describe, uri)).version

    async def _publish_news(self) -> None:
        if self._has_news:
            self._has_news = False
            await self._publish()

    async def _publish(self) -> None:
        before, self._entries = self._entries, self._merged()
        changed = {name for name, entry in self._entries.items() if before.get(name) != entry}
        changed |= before.keys() - self._entries.keys()
        self._departures.see(self._entries.keys() | self._named().keys(), time.monotonic())
        if not changed:
            return
        desired = {ref for entry in self._entries.values() for ref in entry.refs()}
        self._templates.keep(desired)
        self._refusals.keep({*self._named().values(), *(ref.uri for ref in desired)})
        await self._views.advance(changed)

    def _named(self) -> dict[str, str]:
        return named_adapters(self._static, self._state.desired)

    def _kept(self) -> dict[str, str]:
        return dict(islice(self._named().items(), self._max_kept))

    def _merged(self) -> dict[str, Entry]:
        named = self._named()
        self._upkeep.want(named)
        return merged(
            self._loading, self._discovered, named, self._state.desired, self._upkeep, self._refusals
        )


async def _error_of(part: Awaitable[None]) -> Exception | None:
    try:
        await part
    except LorafleetError as error:
        return error
    return None


def _ref(name: str, listing: AdapterListing) -> AdapterRef:
    return AdapterRef(name, listing.uri, listing.version)
