"""What was loaded and removed at run time, kept in one small store that several catalogs may share.

A change is an edit of the latest state: who finds that another catalog has written meanwhile reads that, and
edits again. So a second cluster over the same bucket, or an old catalog beside its successor, loses nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, TypeVar

from engine.adapters.files import SourceChanged
from engine.errors import AccessDenied, Unavailable

logger = logging.getLogger(__name__)

MAX_CONFLICTS = 20  # edits of one change
CONFLICT_DELAY_S = 0.005  # doubled each time, up to 32 times as much

Kept = Literal["bucket", "unguarded_bucket", "file", "memory"]
"""Where the state is. unguarded_bucket: its server does not keep two fleets from overwriting each other;
memory: it is gone with the catalog's process.
"""

T = TypeVar("T")


class Store(Protocol):
    """Blocking calls. Raise LorafleetError."""

    @property
    def kept(self) -> Kept:
        """As far as is known without a call."""

    def read(self) -> tuple[bytes, str] | None:
        """The content and its tag; None: nothing was written yet."""

    def write(self, content: bytes, tag: str | None) -> str:
        """Returns the new tag. Raises SourceChanged if the content is not the one of `tag` any more."""


class CanaryPlace(NamedTuple):
    uri: str
    weight: float  # part of the name's requests that it answers


@dataclass(frozen=True, slots=True)
class Desired:
    loaded: Mapping[str, str] = field(default_factory=dict)  # name -> URI
    removed: frozenset[str] = frozenset()  # though the source or the configuration has them
    canaries: Mapping[str, CanaryPlace] = field(default_factory=dict)  # by the name that they share

    def with_loaded(self, name: str, uri: str) -> Desired:
        """Whole: a canary of that name ends."""
        return Desired({**self.loaded, name: uri}, self.removed - {name}, _but(self.canaries, name))

    def with_canary(self, name: str, uri: str, weight: float) -> Desired:
        """A weight of 0 ends it."""
        canaries = _but(self.canaries, name)
        return replace(self, canaries={**canaries, name: CanaryPlace(uri, weight)} if weight else canaries)

    def without(self, name: str, hide: bool) -> Desired:
        """`hide`: it is also in the source or in the configuration and would come back."""
        removed = self.removed | {name} if hide else self.removed
        return Desired(_but(self.loaded, name), removed, _but(self.canaries, name))

    def encode(self) -> bytes:
        data = {
            "loaded": dict(self.loaded),
            "removed": sorted(self.removed),
            "canaries": {name: list(canary) for name, canary in self.canaries.items()},
        }
        return json.dumps(data, indent=1).encode()

    @staticmethod
    def decode(content: bytes) -> Desired:
        """Raises Unavailable if it is not what `encode` has made."""
        try:
            data = json.loads(content)
            loaded = {str(name): str(uri) for name, uri in data["loaded"].items()}
            canaries = {
                str(name): CanaryPlace(str(uri), float(weight))
                for name, (uri, weight) in data["canaries"].items()
            }
            return Desired(loaded, frozenset(data["removed"]), canaries)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unavailable("the catalog's file or object holds something else") from error


class CatalogState:
    def __init__(self, store: Store | None, may_forget: bool = False) -> None:
        """No store: kept in memory. `may_forget`: so it is too once the store turns out to be read-only."""
        self.desired = Desired()
        self._store = store
        self._may_forget = may_forget
        self._is_told = False  # that nothing is kept
        self._tag: str | None = None
        self._lock = asyncio.Lock()

    @property
    def kept(self) -> Kept:
        return self._store.kept if self._store is not None else "memory"

    async def refresh(self) -> None:
        """Take what others have written. Raises Unavailable if it is not ours, or what the store raises."""
        async with self._lock:
            if self._store is not None:
                await self._read(self._store)

    async def change(self, edit: Callable[[Desired], Desired]) -> None:
        """`edit` may be called several times. Nothing is changed if this raises what the store raises."""
        async with self._lock:
            try:
                desired = edit(self.desired) if self._store is None else await self._write(self._store, edit)
            except AccessDenied as error:
                if not self._may_forget:
                    raise
                logger.warning(error.message)
                self._store = None
                desired = edit(self.desired)
            self.desired = desired
            if self._store is None and not self._is_told:
                self._is_told = True
                logger.warning("what is loaded and unloaded at run time is lost when the catalog restarts")

    async def _write(self, store: Store, edit: Callable[[Desired], Desired]) -> Desired:
        for conflicts in range(MAX_CONFLICTS):
            desired = edit(self.desired)
            try:
                self._tag = await asyncio.to_thread(store.write, desired.encode(), self._tag)
            except SourceChanged:
                # full jitter: else those that met once meet again
                await asyncio.sleep(random.uniform(0.0, CONFLICT_DELAY_S * 2 ** min(conflicts, 5)))
                await self._read(store)
            else:
                return desired
        raise Unavailable("the catalog is being changed by others", retry_after_s=1.0)

    async def _read(self, store: Store) -> None:
        found = await asyncio.to_thread(store.read)
        if found is None:
            self.desired, self._tag = Desired(), None
        elif found[1] != self._tag:
            self.desired, self._tag = Desired.decode(found[0]), found[1]


def _but(of: Mapping[str, T], name: str) -> dict[str, T]:
    return {other: value for other, value in of.items() if other != name}
