"""What is asked of an engine's adapters, and what the end of a load means. Knows requests by their ids only.

    load, unload, pin, unpin   calls: each is answered once, with a CallEvent
    prefetch                   a request is on its way: read its adapter, then copy it ahead
    on_loaded                  a name means what was read; who waited for it is told
    use, release               a content stays while a name means it or a request uses it

A name means what was asked for last by it. Who was on his way already when it was unloaded, or moved on, is
served and names nothing; his content goes with his last request.

The manager has the host tier, the scheduler and its memory have the device's; this keeps them in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from engine.adapters.layout import too_many_pages
from engine.adapters.manager import AdapterManager, Loaded, Version
from engine.errors import AdapterRefused, Conflict, LorafleetError, ModelNotFound, Unavailable
from engine.events import CallEvent
from engine.latecomers import Latecomers
from engine.request import AdapterRef
from engine.scheduler import Scheduler
from engine.stats import EngineStats

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage
    from engine.adapters.loader import LoadResult

MOVED_S = 120.0
"""After a name has moved on here, other replicas may be reading for a while yet; then requests move on."""


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """What the end of a load means for requests, by id, and the calls that it answers."""

    digest: str | None = None  # what was read; None: nothing that can be served
    tier: Literal["disk", "source"] = "source"  # where it was read
    ready: list[str] = field(default_factory=list)  # waited for it, and can be queued
    failed: dict[str, LorafleetError] = field(default_factory=dict)
    answers: list[CallEvent] = field(default_factory=list)


class AdapterControl:
    def __init__(
        self,
        manager: AdapterManager,
        scheduler: Scheduler,
        stats: EngineStats,
        page_bytes: int,
        pinned: Collection[str],
        clock: Callable[[], float],
    ) -> None:
        """`pinned`: names, loaded or not."""
        self.num_live: Counter[str] = Counter()  # digest -> requests that use it
        self._manager = manager
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._stats = stats
        self._page_bytes = page_bytes
        self._pinned = set(pinned)
        self._clock = clock
        self._calls: set[str] = set()  # of load, not yet answered
        self._hinted: set[Version] = set()  # whose image must be read first
        self._unloaded = Latecomers()  # by name
        self._moved = Latecomers(MOVED_S)  # by reference: the name means something else now

    def find(self, ref: AdapterRef | None) -> str | None:
        """Digest of an adapter whose weights are in host memory or in the pool."""
        digest = self._manager.digest(ref) if ref else None
        return digest if digest is not None and self._is_here(digest) else None

    def num_pages(self, digest: str) -> int:
        """Of one that is here."""
        resident = self._memory.residency.get(digest)
        return len(resident.page_ids) if resident else self._manager.image(digest).num_pages

    def use(self, digest: str) -> None:
        self.num_live[digest] += 1
        self._manager.touch(digest)

    def release(self, digest: str) -> None:
        self.num_live[digest] -= 1
        self._drop_if_unused(digest)

    def want(self, ref: AdapterRef, request_id: str) -> None:
        """For a request that waits until it has been read."""
        self._manager.want(ref, request_id, is_named=not self._is_late(ref))

    def found(self, ref: AdapterRef, digest: str) -> None:
        """A request or a hint for it came, and it is here: it may be known by another name only."""
        if self._manager.digest_of(ref.name) != digest and not self._is_late(ref):
            self._name(ref.name, digest)

    def load(self, call_id: str, ref: AdapterRef) -> CallEvent | None:
        """Read and validate it into host memory. None: the end of the load answers."""
        self._unloaded.discard(ref.name)
        self._moved.discard(ref)
        digest = self._manager.digest(ref)
        if digest is not None and digest in self._manager:
            self._name(ref.name, digest)
            return self._report(call_id, digest)
        self._calls.add(call_id)
        self._manager.want(ref, call_id)
        return None

    def prefetch(self, ref: AdapterRef) -> None:
        if self._is_late(ref):
            return
        digest = self.find(ref)
        if digest is None:
            self._hinted.add(Version(ref.uri, ref.version))
            self._manager.want(ref)
        else:
            self.found(ref, digest)
            self._hint(digest, self.num_pages(digest))

    def unload(self, call_id: str, name: str) -> CallEvent:
        """Its requests finish; then its pages and host bytes are free."""
        self._unloaded.expect(name, self._clock())  # also where nobody has asked for it yet
        is_known = self._manager.digest_of(name) is not None or name in self._manager.loading_names
        self._left(self._manager.unload(name))
        self._stats.adapters.pop(name, None)
        return CallEvent(call_id, result={}) if is_known else CallEvent(call_id, error=_not_loaded(name))

    def pin(self, call_id: str, name: str) -> CallEvent:
        """Keep what the name means, now and later, in the pool."""
        digest = self._manager.digest_of(name)
        if digest is None:
            return CallEvent(call_id, error=_not_loaded(name))
        if self._is_here(digest):
            try:
                self._pin(digest)
            except Conflict as error:
                return CallEvent(call_id, error=error)
        else:
            self._manager.want_again(digest)  # and pinned when it has been read
        self._pinned.add(name)
        self._stats.touched |= self._manager.names_of(digest)
        return CallEvent(call_id, result={})

    def unpin(self, call_id: str, name: str) -> CallEvent:
        """A name that is not pinned stays so."""
        self._pinned.discard(name)
        self._left(self._manager.digest_of(name))
        return CallEvent(call_id, result={})

    def on_loaded(self, result: LoadResult) -> LoadEnd:
        """The caller queues and fails requests as told, then calls `settle`."""
        before = self._manager.digest(result.ref)
        version = Version(result.ref.uri, result.ref.version)
        is_hinted = version in self._hinted
        self._hinted.discard(version)
        # its waiters need the image as much as requests that are queued already
        needed = self._needed() | ({result.image.digest} if result.image else frozenset())
        loaded = self._manager.on_loaded(result, needed)
        error = loaded.error or self._refusal(loaded)
        if error is None:
            assert loaded.image is not None
            end = self._on_image(loaded, loaded.image, is_hinted)
        else:
            end = self._on_error(loaded, error, is_hinted)
        if before is not None and not self._is_here(before):
            # it left host memory while requests were queued for it, and cannot be read again
            changed = Unavailable("the adapter changed at its source meanwhile", retry_after_s=1.0)
            for seq in self._scheduler.waiting:
                if seq.digest == before:
                    end.failed[seq.request_id] = error or changed
        return end

    def settle(self, end: LoadEnd | None = None) -> None:
        """Let images into the host cache where there is room now, and start the loads that waited for it.

        What was read for nobody who is left goes.
        """
        if end is not None and end.digest is not None:
            self._drop_if_unused(end.digest)
        self._manager.settle(self._needed())

    def _on_image(self, loaded: Loaded, image: AdapterImage, is_hinted: bool) -> LoadEnd:
        digest = image.digest
        self._memory.order.used(digest, self._clock(), count=0.0)
        self._scheduler.prefetcher.in_host(digest, image.num_pages)
        for name in loaded.names:
            self._name(name, digest)
        if is_hinted:
            self._hint(digest, image.num_pages)
        if loaded.ref.name in self._manager.names_of(digest):
            self._stats.adapter(loaded.ref.name).on_load(loaded.seconds, image.is_from_disk)
        self._stats.load_seconds.observe(loaded.seconds)
        calls, ready = self._split(loaded.waiters)
        answers = [self._report(call_id, digest) for call_id in calls]
        return LoadEnd(digest, "disk" if image.is_from_disk else "source", ready, answers=answers)

    def _on_error(self, loaded: Loaded, error: LorafleetError, is_hinted: bool) -> LoadEnd:
        name = loaded.ref.name
        is_news = loaded.seconds > 0  # and not remembered of a request's load
        if is_hinted and is_news and not loaded.waiters and not isinstance(error, AdapterRefused):
            self._manager.forget_failure(loaded)
        if name in self._stats.adapters:
            self._stats.adapter(name).load_failures += 1
        calls, waiting = self._split(loaded.waiters)
        answers = [CallEvent(call_id, error=error) for call_id in calls]
        return LoadEnd(failed=dict.fromkeys(waiting, error), answers=answers)

    def _split(self, waiters: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Calls, which are answered now, and requests."""
        calls = [waiter for waiter in waiters if waiter in self._calls]
        requests = [waiter for waiter in waiters if waiter not in self._calls]
        self._calls.difference_update(calls)
        return calls, requests

    def _report(self, call_id: str, digest: str) -> CallEvent:
        return CallEvent(call_id, result=self._manager.image(digest).report)

    def _refusal(self, loaded: Loaded) -> AdapterRefused | None:
        """Of what was read, but is too large for the pool."""
        if loaded.image is None:
            return None
        num_pages = loaded.image.num_pages
        capacity = self._memory.pool.num_pages - self._memory.residency.num_pinned_pages
        # one page at least must be left for the KV of its requests
        if num_pages < capacity:
            return None
        error = too_many_pages(num_pages, capacity - 1, self._page_bytes)
        self._manager.refuse(loaded, error)
        return error

    def _is_here(self, digest: str) -> bool:
        return digest in self._manager or self._memory.residency.get(digest) is not None

    def _needed(self) -> frozenset[str]:
        """Digests to copy from host memory: for waiting requests, and pinned ones that wait for room."""
        residency = self._memory.residency
        waiting = {s.digest for s in self._scheduler.waiting if s.digest and residency.get(s.digest) is None}
        return frozenset(waiting | residency.absent_pinned.keys())

    def _hint(self, digest: str, num_pages: int) -> None:
        self._scheduler.prefetcher.hint(digest, num_pages, self._clock())

    def _pin(self, digest: str) -> None:
        """Raises Conflict."""
        self._scheduler.pin(digest, self.num_pages(digest))

    def _name(self, name: str, digest: str) -> None:
        """It means this content from now on, which is here."""
        if self._manager.digest_of(name) not in (None, digest):
            for ref in self._manager.refs_of(name):
                self._moved.expect(ref, self._clock())
        self._left(self._manager.rename(name, digest))
        self._scheduler.keep(digest)
        if digest in self._manager:
            self._stats.adapter(name).rank = self._manager.image(digest).rank
        if not self._pinned.isdisjoint(self._manager.names_of(digest)):
            # a version that finds no room is served unpinned; `pinned` in the statistics tells
            with suppress(Conflict):
                self._pin(digest)

    def _left(self, digest: str | None) -> None:
        """A name does not mean this content any more, or is not pinned any more."""
        if digest is None:
            return
        names = self._manager.names_of(digest)
        if not names:
            self._scheduler.retire(digest)
            self._drop_if_unused(digest)
        elif self._pinned.isdisjoint(names):
            self._memory.residency.unpin(digest)
            self._stats.touched |= names

    def _drop_if_unused(self, digest: str) -> None:
        """A content that no name means goes when its last request has ended."""
        if self.num_live[digest] == 0:
            del self.num_live[digest]
            if not self._manager.names_of(digest):
                self._scheduler.retire(digest)
                self._manager.drop(digest)

    def _is_late(self, ref: AdapterRef) -> bool:
        now = self._clock()
        return self._unloaded.is_late(ref.name, now) or self._moved.is_late(ref, now)


def _not_loaded(name: str) -> ModelNotFound:
    return ModelNotFound(f"adapter {name!r} is not loaded", param="model")
