"""Adapters on their way to the pool: names, content versions, the host tier, loads in flight.

Reading is the work of the loader's threads; everything here runs on the engine's loop and never waits.
An image that finds no room in the host cache is parked: it can go to the pool from there. While images are
parked fewer loads start, so that memory beyond the cache stays bounded by `max_parallel_loads` images.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.adapters.host_cache import HostCache
from engine.errors import LorafleetError
from engine.request import AdapterRef

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage
    from engine.adapters.loader import LoadResult


class Version(NamedTuple):
    """One state of an adapter at its source."""

    uri: str
    version: str


class Loader(Protocol):
    def submit(self, ref: AdapterRef) -> None:
        """Start reading that version; its result arrives later, exactly once."""

    def close(self) -> None: ...


class Loaded(NamedTuple):
    """A load that ended: who waited for it, and for what."""

    ref: AdapterRef
    waiters: tuple[str, ...]
    image: AdapterImage | None
    error: LorafleetError | None
    seconds: float


class AdapterManager:
    def __init__(self, loader: Loader, host_cache_bytes: int, max_parallel_loads: int) -> None:
        self.cache = HostCache(host_cache_bytes)
        self._loader = loader
        self._max_parallel_loads = max_parallel_loads
        self._images: dict[str, AdapterImage] = {}  # by digest: cached or parked
        self._parked: list[str] = []
        self._digests: dict[Version, str] = {}  # of versions read before
        self._refs: dict[str, AdapterRef] = {}  # digest -> where to read it again
        self._names: dict[str, str] = {}  # name -> digest of its newest version
        self._in_flight: dict[Version, AdapterRef] = {}  # loads submitted or queued
        self._waiters: dict[Version, list[str]] = {}  # of these
        self._queue: deque[AdapterRef] = deque()  # not submitted yet
        self._num_loading = 0
        self.num_evicted = 0  # images dropped from host memory for want of room

    def __contains__(self, digest: object) -> bool:
        """In host memory."""
        return digest in self._images

    def image(self, digest: str) -> AdapterImage:
        return self._images[digest]

    def digest(self, ref: AdapterRef) -> str | None:
        """Of the content that this version had when it was read; None: it never was."""
        return self._digests.get(Version(ref.uri, ref.version))

    @property
    def names(self) -> dict[str, str]:
        return dict(self._names)

    @property
    def loading_names(self) -> set[str]:
        """Of loads in flight or queued."""
        return {ref.name for ref in self._in_flight.values()}

    def touch(self, digest: str) -> None:
        if digest in self.cache:
            self.cache.touch(digest)

    def want(self, ref: AdapterRef, waiter: str | None = None) -> None:
        """Read it, unless a load of that version is under way; `waiter` is named in the result."""
        version = Version(ref.uri, ref.version)
        if version not in self._waiters:
            self._waiters[version] = []
            self._in_flight[version] = ref
            self._queue.append(ref)
            self._start_loads()
        if waiter is not None:
            self._waiters[version].append(waiter)

    def want_again(self, digest: str) -> None:
        """An image that left host memory is needed once more."""
        self.want(self._refs[digest])

    def leave(self, waiter: str) -> None:
        """It waits no longer. The load goes on: others may share it, and it is wanted soon again."""
        for waiters in self._waiters.values():
            if waiter in waiters:
                waiters.remove(waiter)

    def on_loaded(self, result: LoadResult, needed: Set[str]) -> Loaded:
        """`needed`: digests that waiting requests will load from host memory; not evicted for this one."""
        ref = result.ref
        version = Version(ref.uri, ref.version)
        waiters = tuple(self._waiters.pop(version))
        del self._in_flight[version]
        self._num_loading -= 1
        error = result.error
        image = result.image
        if image is not None and image.nbytes > self.cache.capacity_bytes:
            error = self.cache.too_large(image.nbytes)
            image = None
        if image is not None:
            self._digests[version] = image.digest
            self._refs[image.digest] = ref
            if image.digest not in self._images:
                self._images[image.digest] = image
                self._parked.append(image.digest)
        self.settle(needed)
        return Loaded(ref, waiters, image, error, result.seconds)

    def settle(self, needed: Set[str]) -> None:
        """Move parked images to the cache where there is room now, then start what waited for that."""
        for digest in list(self._parked):
            evicted = self.cache.put(digest, self._images[digest].nbytes, protected=needed)
            if evicted is None:
                if digest in needed:
                    continue
                del self._images[digest]  # nobody waits for it and there is no room
            else:
                for other in evicted:
                    del self._images[other]
                self.num_evicted += len(evicted)
            self._parked.remove(digest)
        self._start_loads()

    def rename(self, name: str, digest: str) -> str | None:
        """`name` now means this content. Returns the digest that no name means any more, if there is one."""
        old = self._names.get(name)
        self._names[name] = digest
        return self._orphan(old) if old != digest else None

    def unload(self, name: str) -> str | None:
        """Forget a name. Returns as `rename`; KeyError if it is unknown."""
        return self._orphan(self._names.pop(name))

    def drop(self, digest: str) -> None:
        """Free the image; the content must be read again to be used again."""
        if self._images.pop(digest, None) is None:
            return
        if digest in self._parked:
            self._parked.remove(digest)
        else:
            self.cache.remove(digest)

    def close(self) -> None:
        self._loader.close()

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        assert set(self._images) == set(self.cache.digests) | set(self._parked)
        assert self._num_loading + len(self._queue) == len(self._waiters)

    def _orphan(self, digest: str | None) -> str | None:
        if digest is None or digest in self._names.values():
            return None
        self._digests = {v: d for v, d in self._digests.items() if d != digest}
        return digest

    def _start_loads(self) -> None:
        while self._queue and self._num_loading + len(self._parked) < self._max_parallel_loads:
            self._num_loading += 1
            self._loader.submit(self._queue.popleft())
