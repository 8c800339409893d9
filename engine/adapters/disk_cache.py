"""A bounded cache of adapters' files in a local directory, shared by all processes on the machine.

    <root>/entries/<key>/            one version of one adapter: its files as they were read, and entry.json
    <root>/tmp/<random>[-<bytes>]/   being removed, or written with so many bytes reserved
    <root>/lock                      held while room is made

An entry appears by one rename, when it is whole and on disk, so nobody sees part of one, whenever a process
ends. Whoever reads an entry or writes into tmp/ holds a lock on that directory, which the kernel frees when
the process dies: an entry that is locked is not evicted, and what lies in tmp/ unlocked was left by a crash.

The entry used longest ago goes first; its directory's mtime tells. When room is needed, as much is made as
leaves a tenth of the capacity free, so that not every new entry evicts one. Less is kept where others fill
the volume.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.adapters.files import AdapterFile, AdapterListing, SourceChanged, read_open_file

LOW_WATER = 0.9
_ENTRY_FILE = "entry.json"
_BLOCK_BYTES = 4096
_STEP_BYTES = 4 << 20

Contents = Mapping[str, bytes | memoryview]


class DiskCache:
    """All methods may raise OSError, `write` above all; then nothing of it is left."""

    def __init__(self, root: str, capacity_bytes: int) -> None:
        self._root = Path(root)
        self._entries = self._root / "entries"
        self._tmp = self._root / "tmp"
        self._capacity_bytes = capacity_bytes
        for path in (self._root, self._entries, self._tmp):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def open(self, uri: str, version: str) -> CachedFolder | None:
        """To be closed. None if that version is not here."""
        path = self._path(uri, version)
        fd = _lock_dir(path, fcntl.LOCK_SH)
        if fd is None:
            return None
        try:
            folder = CachedFolder(fd, uri, version)
        except (OSError, ValueError, KeyError, TypeError):
            os.close(fd)
            self.discard(uri, version)
            return None
        with suppress(OSError):  # a volume that takes no writes any more can still be read
            os.utime(fd)
        return folder

    def write(self, listing: AdapterListing, contents: Contents, digests: Mapping[str, str]) -> bool:
        """Keep what was read; `digests`: SHA-256 of whole files. False if there is no room to be had."""
        path = self._path(listing.uri, listing.version)
        if path.exists():
            return True
        facts = json.dumps(_facts(listing, contents, digests), indent=1).encode()
        files = {**contents, _ENTRY_FILE: facts}
        num_bytes = sum(_blocks(len(content)) for content in files.values())
        tmp = self._tmp / f"{uuid.uuid4().hex}-{num_bytes}"
        with self._locked():
            if not self._make_room(num_bytes):
                return False
            tmp.mkdir(mode=0o700)
            fd = _lock_dir(tmp, fcntl.LOCK_EX)
            assert fd is not None
        try:
            # all room is taken before the first byte is written: a full volume shows at once
            for name, content in files.items():
                _allocate(tmp / name, len(content))
            for name, content in files.items():
                _write(tmp / name, content)
            os.fsync(fd)
            fcntl.flock(fd, fcntl.LOCK_SH)  # from here on it may be read
            self._publish(tmp, path)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
            os.close(fd)
        return True

    def discard(self, uri: str, version: str) -> None:
        """It turned out to be damaged."""
        with self._locked():
            self._evict(self._path(uri, version))

    @property
    def used_bytes(self) -> int:
        """By all processes, what is being written included."""
        # in this order: what is published meanwhile counts twice at worst
        writing = sum(max(_reserved(path), _dir_bytes(path)) for path in _children(self._tmp))
        return writing + sum(map(_dir_bytes, _children(self._entries)))

    def _path(self, uri: str, version: str) -> Path:
        return self._entries / hashlib.sha256(f"{uri}\n{version}".encode()).hexdigest()[:32]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _make_room(self, num_bytes: int) -> bool:
        for path in _children(self._tmp):
            _remove_unlocked(path)
        used = self.used_bytes
        volume = os.statvfs(self._root)
        # others fill the volume too
        capacity = min(self._capacity_bytes, used + volume.f_bavail * volume.f_frsize)
        must_free = used + num_bytes - capacity
        if must_free <= 0:
            return True
        if num_bytes > capacity:
            return False
        excess = must_free + int((1 - LOW_WATER) * capacity)
        for path in sorted(_children(self._entries), key=_mtime):
            if excess <= 0:
                break
            freed = self._evict(path)
            must_free -= freed
            excess -= freed
        return must_free <= 0

    def _evict(self, path: Path) -> int:
        """Bytes freed; none if it is being read, or gone."""
        fd = _lock_dir(path, fcntl.LOCK_EX)
        if fd is None:
            return 0
        try:
            freed = _dir_bytes(path)
            tmp = self._tmp / uuid.uuid4().hex
            path.rename(tmp)  # a reader finds all of it or nothing
            shutil.rmtree(tmp, ignore_errors=True)
            return freed
        finally:
            os.close(fd)

    def _publish(self, tmp: Path, path: Path) -> None:
        try:
            tmp.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return  # another process was first
        fd = os.open(self._entries, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class CachedFolder:
    """One entry, which stays as long as this is open. To be closed."""

    parallel_reads = 1

    def __init__(self, fd: int, uri: str, version: str) -> None:
        """`fd`: of the locked directory. Raises OSError, ValueError, KeyError or TypeError if damaged."""
        self._fd = fd
        facts = json.loads(self._read_whole(_ENTRY_FILE))
        files = [AdapterFile(f["name"], f["size"], f["etag"]) for f in facts["files"]]
        self.listing = AdapterListing(facts["name"], facts["uri"], facts["version"], tuple(files))
        self.digests: dict[str, str] = facts["sha256"]
        self._stored: dict[str, int] = facts["stored"]
        if (facts["uri"], facts["version"]) != (uri, version):
            raise ValueError
        for name, size in self._stored.items():
            if os.stat(name, dir_fd=fd, follow_symlinks=False).st_size != size:
                raise ValueError

    def __enter__(self) -> CachedFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def list_files(self) -> AdapterListing:
        return self.listing

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        """As Folder.read; SourceChanged too if more is asked for than was stored, or the disk fails."""
        if offset + len(view) > self._stored.get(file.name, 0):
            raise SourceChanged
        try:
            fd = self._open(file.name)
            try:
                read_open_file(fd, offset, view, check)
            finally:
                os.close(fd)
        except OSError as error:
            raise SourceChanged from error

    def _read_whole(self, name: str) -> bytes:
        with os.fdopen(self._open(name), "rb") as file:
            return file.read()

    def _open(self, name: str) -> int:
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)


def _facts(listing: AdapterListing, contents: Contents, digests: Mapping[str, str]) -> dict[str, Any]:
    """entry.json."""
    return {
        "uri": listing.uri,
        "name": listing.name,
        "version": listing.version,
        "files": [{"name": f.name, "size": f.size, "etag": f.etag} for f in listing.files],
        "stored": {
            name: len(content) for name, content in contents.items()
        },  # of some only the start was read
        "sha256": dict(digests),
    }


def _lock_dir(path: Path, mode: int) -> int | None:
    """An open, locked directory; None if there is none, or another holds a lock against that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(path), os.fstat(fd)):  # else it was moved away before it was locked
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _remove_unlocked(path: Path) -> None:
    fd = _lock_dir(path, fcntl.LOCK_EX)
    if fd is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _allocate(path: Path, num_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)


def _write(path: Path, content: bytes | memoryview) -> None:
    with path.open("r+b", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view[:_STEP_BYTES]) :]
        os.fsync(file.fileno())


def _children(path: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        return [Path(entry.path) for entry in entries]
    return []


def _dir_bytes(path: Path) -> int:
    return sum(_blocks(_size_of(child)) for child in _children(path))


def _reserved(path: Path) -> int:
    """Bytes that this directory in tmp/ will have."""
    num_bytes = path.name.partition("-")[2]
    return int(num_bytes) if num_bytes.isdecimal() else 0


def _size_of(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0


def _mtime(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def _blocks(num_bytes: int) -> int:
    """Bytes on disk."""
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
