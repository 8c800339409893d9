"""Where the catalog's state is kept: an object beside the adapters in S3, or a file."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path

from engine.adapters.files import SourceChanged
from engine.adapters.source import is_s3
from engine.errors import AccessDenied, Unavailable
from router.catalog_state import CatalogState, Kept

PLACE = ".lorafleet/catalog.json"  # no name of an adapter begins with a dot


def open_state(source_uri: str | None, file: Path | None) -> CatalogState:
    """In the file if one is named, else beside the adapters of the source, else in memory."""
    if file is not None:
        return CatalogState(FileStore(file))
    if source_uri is None:
        return CatalogState(None)
    if is_s3(source_uri):
        # boto3 takes half a second to import: only those who use S3 pay for it
        from router.catalog_bucket import BucketStore

        return CatalogState(BucketStore(f"{source_uri.rstrip('/')}/{PLACE}"))
    # nobody has asked for this file, and adapters may come from a directory that is only read
    return CatalogState(FileStore(Path(source_uri) / PLACE), may_forget=True)


class FileStore:
    """Processes that share it take turns; a lock file beside it tells whose it is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def kept(self) -> Kept:
        # not Path.exists: that raises where a folder may not be looked into
        there = next(path for path in (self._path.parent, *self._path.parent.parents) if os.path.exists(path))
        return "file" if os.access(there, os.W_OK | os.X_OK) else "memory"

    def read(self) -> tuple[bytes, str] | None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _as_ours(error) from error
        return content, hashlib.sha256(content).hexdigest()

    def write(self, content: bytes, tag: str | None) -> str:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_name(f".{self._path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.read()
                if (found[1] if found else None) != tag:
                    raise SourceChanged
                _replace_file(self._path, content)
        except OSError as error:
            raise _as_ours(error) from error
        return hashlib.sha256(content).hexdigest()


def _replace_file(path: Path, content: bytes) -> None:
    """All or nothing, and there to stay when this returns, also if the machine goes down."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _as_ours(error: OSError) -> AccessDenied | Unavailable:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied("the catalog's file cannot be accessed")
    return Unavailable("the catalog's file cannot be read or written", retry_after_s=5.0)
