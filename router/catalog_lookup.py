"""Names that no listing has told of yet, looked up one by one. Junk is remembered, and cannot flood it."""

from __future__ import annotations

import asyncio
import time

from engine.adapters.source import AdapterListing, AdapterSource
from engine.errors import InvalidRequest, ModelNotFound, Unavailable
from router.shared_calls import SharedCalls

NEGATIVE_S = 5.0  # how long a name that the source does not have stays unknown
MAX_PROBES = 8  # at a time
MAX_NEGATIVE = 4096


class SourceLookup:
    def __init__(self, source: AdapterSource) -> None:
        self._source = source
        self._unknown: dict[str, float] = {}  # name -> until when
        # a new adapter is often asked for by many at once
        self._probes = SharedCalls[str, AdapterListing]()

    async def find(self, name: str, is_listed: bool) -> AdapterListing:
        """`is_listed`: a listing that is not old does not have it.

        Raises ModelNotFound; Unavailable or AccessDenied if the source cannot tell.
        """
        if self._unknown.get(name, 0.0) > time.monotonic():
            raise ModelNotFound(f"no adapter {name!r}")
        if name not in self._probes and len(self._probes) >= MAX_PROBES:
            if is_listed:
                raise ModelNotFound(f"no adapter {name!r}")
            raise Unavailable("the adapter source is busy", retry_after_s=1.0)
        return await self._probes.get(name, lambda: self._probe(name))

    async def _probe(self, name: str) -> AdapterListing:
        try:
            return await asyncio.to_thread(self._source.find, name)
        except (ModelNotFound, InvalidRequest):
            self._remember_unknown(name)
            raise ModelNotFound(f"no adapter {name!r}") from None

    def _remember_unknown(self, name: str) -> None:
        self._unknown.pop(name, None)
        self._unknown[name] = time.monotonic() + NEGATIVE_S
        if len(self._unknown) > MAX_NEGATIVE:
            del self._unknown[next(iter(self._unknown))]
