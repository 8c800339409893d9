"""Where the catalog's state is kept: an object beside the adapters in S3, or a file."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from engine.adapters.files import SourceChanged
from engine.adapters.source import is_s3
from engine.errors import AccessDenied, Unavailable
from router.catalog_state import Store

OBJECT_NAME = ".lorafleet/catalog.json"  # no name of an adapter begins with a dot


def open_store(source_uri: str | None, file: Path | None) -> Store | None:
    """The file if one is named, else the bucket that the adapters come from. None: there is neither."""
    if file is not None:
        return FileStore(file)
    if source_uri is not None and is_s3(source_uri):
        # boto3 takes half a second to import: only those who use S3 pay for it
        from engine.adapters.s3 import S3Object

        return S3Object(f"{source_uri.rstrip('/')}/{OBJECT_NAME}")
    return None


class FileStore:
    def __init__(self, path: Path) -> None:
        self._path = path

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
    """All or nothing, also if the machine goes down."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _as_ours(error: OSError) -> AccessDenied | Unavailable:
    if isinstance(error, PermissionError):
        return AccessDenied("the catalog's file cannot be accessed")
    return Unavailable("the catalog's file cannot be read or written", retry_after_s=5.0)
