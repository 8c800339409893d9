"""Adapters on their way to the pool: names, content versions, the host tier, loads in flight.

Reading is the work of the loader's threads; everything here runs on the engine's loop and never waits.
An image that finds no room in the host cache is parked: it can go to the pool from there. While images are
parked fewer loads start, so that memory beyond the cache stays bounded by STALL_FACTOR * `max_parallel_loads`
images. The loader runs `max_parallel_loads` of the loads that it has; the others are for when some stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.adapters.host_cache import HostCache
from engine.adapters.layout import too_many_bytes
from engine.errors import AdapterRefused, LorafleetError
from engine.request import AdapterRef

if TYPE_CHECKING:
    from engine.adapters.image import AdapterImage
    from engine.adapters.loader import LoadResult


STALL_FACTOR = 4


class Version(NamedTuple):
    """One state of an adapter at its source."""

    uri: str
    version: str


class Loader(Protocol):
    def submit(self, ref: AdapterRef) -> None:
        """Start reading that version; its result arrives later, exactly once."""

    def refuse(self, ref: AdapterRef, error: AdapterRefused) -> None:
        """For a while, loads of that version fail with this error, and nothing is read."""

    def forget_failure(self, ref: AdapterRef) -> None:
        """The next load of that version is tried, whatever became of the last one."""

    def close(self) -> None: ...


class Loaded(NamedTuple):
    """A load that ended: who waited for it, and for what."""

    ref: AdapterRef
    waiters: tuple[str, ...]
    image: AdapterImage | None
    error: LorafleetError | None
    seconds: float
    names: tuple[str, ...]  # that are to mean it
    is_new: bool = False  # no request can be using this content yet


class AdapterManager:
    def __init__(
        self,
        loader: Loader,
        host_cache_bytes: int,
        max_parallel_loads: int,
        worth: Callable[[str, int], float] | None = None,
    ) -> None:
        """`worth` of an image in host memory, from its digest and pages: the least goes first. None: LRU."""
        self.cache = HostCache(host_cache_bytes, self._worth if worth else None)
        self._image_worth = worth
        self._loader = loader
        self._max_in_flight = STALL_FACTOR * max_parallel_loads
        self._images: dict[str, AdapterImage] = {}  # by digest: cached or parked
        self._parked: list[str] = []
        self._digests: dict[Version, str] = {}  # of versions read before
        self._versions: dict[str, list[Version]] = {}  # the other way round
        self._refs: dict[str, AdapterRef] = {}  # digest -> where to read it again, while it is in use
        self._names: dict[str, str] = {}  # name -> digest of its newest version
        self._names_of: dict[str, set[str]] = {}  # the other way round
        self.touched: set[str] = set()  # names whose digest or image changed since they were told
        self._waiters: dict[Version, list[str]] = {}  # of loads submitted or queued
        # name -> which of these it will mean: the one that was asked for last, whichever ends first
        self._wanted: dict[str, Version] = {}
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

    def digest_of(self, name: str) -> str | None:
        """Of its newest version that was read."""
        return self._names.get(name)

    def names_of(self, digest: str) -> Set[str]:
        return self._names_of.get(digest, frozenset())

    def refs_of(self, name: str) -> list[AdapterRef]:
        """What it means, as it may be asked for."""
        return [AdapterRef(name, *version) for version in self._versions.get(self._names.get(name, ""), ())]

    @property
    def loading_names(self) -> Set[str]:
        """Those that will mean what is in flight or queued."""
        return self._wanted.keys()

    def touch(self, digest: str) -> None:
        if digest in self.cache:
            self.cache.touch(digest)

    def want(self, ref: AdapterRef, waiter: str | None = None, is_named: bool = True) -> None:
        """Read it, unless a load of that version is under way; `waiter` is named in the result.

        `is_named`: the name is to mean it then, if nothing else is asked for by that name meanwhile.
        """
        version = Version(ref.uri, ref.version)
        if version not in self._waiters:
            self._waiters[version] = []
            self._queue.append(ref)
            self._start_loads()
        if is_named:
            self._wanted[ref.name] = version
        if waiter is not None:
            self._waiters[version].append(waiter)

    def want_again(self, digest: str) -> None:
        """An image that left host memory is needed once more."""
        ref = self._refs[digest]
        self.want(ref, is_named=False)
        for name in self.names_of(digest):  # if the bytes have changed, they follow
            self._wanted.setdefault(name, Version(ref.uri, ref.version))

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
        names = tuple(name for name, wanted in self._wanted.items() if wanted == version)
        for name in names:
            del self._wanted[name]
        self._num_loading -= 1
        error = result.error
        image = result.image
        if image is not None and image.nbytes > self.cache.capacity_bytes:
            error = too_many_bytes(image.nbytes, self.cache.capacity_bytes)
            self._loader.refuse(ref, error)
            image = None
        is_new = image is not None and image.digest not in self._refs
        if image is not None:
            self._remember(version, image.digest)
            self._refs[image.digest] = ref
            if image.digest not in self._images:
                self._images[image.digest] = image
                self._parked.append(image.digest)
                self.touched |= self.names_of(image.digest)
        self.settle(needed)
        return Loaded(ref, waiters, image, error, result.seconds, names, is_new)

    def settle(self, needed: Set[str]) -> None:
        """Move parked images to the cache where there is room now, then start what waited for that."""
        for digest in list(self._parked):
            evicted = self.cache.put(digest, self._images[digest].nbytes, protected=needed)
            if evicted is None:
                if digest in needed:
                    continue
                self._forget_image(digest)  # nobody waits for it and there is no room
            else:
                for other in evicted:
                    self._forget_image(other)
                self.num_evicted += len(evicted)
            self._parked.remove(digest)
        self._start_loads()

    def rename(self, name: str, digest: str) -> str | None:
        """`name` now means this content. Returns the digest of another one that it meant before."""
        self._wanted.pop(name, None)
        old = self._names.get(name)
        if old == digest:
            return None
        self._names[name] = digest
        self._names_of.setdefault(digest, set()).add(name)
        self.touched.add(name)
        if old is not None:
            self._leave(name, old)
        return old

    def unload(self, name: str) -> str | None:
        """Forget a name, also one that is only being read. Returns as `rename`."""
        self._wanted.pop(name, None)
        digest = self._names.pop(name, None)
        if digest is not None:
            self.touched.add(name)
            self._leave(name, digest)
        return digest

    def drop(self, digest: str) -> None:
        """No request uses this content: free its image and, unless a name means it, forget it."""
        self._free(digest)
        if digest not in self._names_of:
            self._refs.pop(digest, None)
            self._forget_versions(digest)

    def refuse(self, loaded: Loaded, error: AdapterRefused) -> None:
        """It was read, but cannot be served: free it, and for a while do not read it again to no avail."""
        assert loaded.image is not None
        self._loader.refuse(loaded.ref, error)
        if loaded.is_new:
            self.drop(loaded.image.digest)
        else:
            self._free(loaded.image.digest)

    def forget_failure(self, loaded: Loaded) -> None:
        """Nobody waited for it: who asks next is not answered with it."""
        self._loader.forget_failure(loaded.ref)

    def close(self) -> None:
        self._loader.close()

    def check_invariants(self) -> None:
        self.cache.check_invariants()
        assert set(self._digests.values()) <= set(self._refs)
        read = [(version, digest) for digest, versions in self._versions.items() for version in versions]
        assert sorted(read) == sorted(self._digests.items())
        pairs = {(name, digest) for digest, names in self._names_of.items() for name in names}
        assert pairs == set(self._names.items())
        assert set(self._images) == set(self.cache.digests) | set(self._parked)
        assert self._num_loading + len(self._queue) == len(self._waiters)
        assert set(self._wanted.values()) <= self._waiters.keys()

    def _free(self, digest: str) -> None:
        if digest not in self._images:
            return
        self._forget_image(digest)
        if digest in self._parked:
            self._parked.remove(digest)
        else:
            self.cache.remove(digest)

    def _forget_image(self, digest: str) -> None:
        del self._images[digest]
        self.touched |= self.names_of(digest)

    def _leave(self, name: str, digest: str) -> None:
        names = self._names_of[digest]
        names.remove(name)
        if not names:
            del self._names_of[digest]
            self._forget_versions(digest)

    def _remember(self, version: Version, digest: str) -> None:
        """A file that is written again with the same bytes is a new version each time: keep the last one."""
        for old in (version, *(v for v in self._versions.get(digest, ()) if v.uri == version.uri)):
            self._forget_version(old)
        self._digests[version] = digest
        self._versions.setdefault(digest, []).append(version)

    def _forget_version(self, version: Version) -> None:
        digest = self._digests.pop(version, None)
        if digest is not None:
            self._versions[digest].remove(version)
            if not self._versions[digest]:
                del self._versions[digest]

    def _forget_versions(self, digest: str) -> None:
        for version in self._versions.pop(digest, ()):
            del self._digests[version]

    def _worth(self, digest: str) -> float:
        assert self._image_worth is not None
        return self._image_worth(digest, self._images[digest].num_pages)

    def _start_loads(self) -> None:
        while self._queue and self._num_loading + len(self._parked) < self._max_in_flight:
            self._num_loading += 1
            self._loader.submit(self._queue.popleft())
