"""A base model under an S3 prefix: small files are copied to a local cache, weights are read by ranges.

The cache is `$LORAFLEET_CACHE/models`, or ~/.cache/lorafleet/models; each state of a prefix has a directory
of its own, so that processes of one machine may share it, and a model that changes never mixes with its past.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from engine.adapters.files import AdapterFile, SourceChanged
from engine.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from engine.adapters.s3 import S3Folder

_SCHEME = "s3://"
_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    folder: S3Folder
    file: AdapterFile

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.size

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes [start, stop). May be called by several threads. Raises LorafleetErrors."""
        buffer = bytearray(stop - start)
        try:
            self.folder.read(self.file, start, memoryview(buffer), lambda: None)
        except SourceChanged:
            raise Unavailable(f"the base model's {self.name} changed while it was read") from None
        return buffer


def is_remote(model: str) -> bool:
    return model.startswith(_SCHEME)


def list_weights(uri: str) -> list[RemoteFile]:
    """Its safetensors, by name."""
    files = [file for file in _list(uri) if file.name.endswith(".safetensors")]
    return sorted(files, key=lambda file: file.name)


def fetch_small_files(uri: str) -> Path:
    """A local directory with configuration and tokenizer. Raises LorafleetErrors."""
    files = _list(uri)
    if all(file.name != "config.json" for file in files):
        raise InvalidRequest(f"{uri} holds no config.json", param="model")
    directory = _cache_directory() / _state(files)
    if not directory.is_dir():
        small = [file for file in files if any(fnmatch(file.name, pattern) for pattern in _SMALL_FILES)]
        _download(small, directory)
    return directory


def _list(uri: str) -> list[RemoteFile]:
    # boto3 takes half a second to import: only those who use S3 pay for it
    from engine.adapters.s3 import S3Folder

    folder = S3Folder(uri, "base model")
    return [RemoteFile(folder, file) for file in folder.list_all()]


def _state(files: Sequence[RemoteFile]) -> str:
    lines = sorted(f"{file.name}\t{file.size}\t{file.file.etag}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _cache_directory() -> Path:
    return Path(os.environ.get("LORAFLEET_CACHE", "~/.cache/lorafleet")).expanduser() / "models"


def _download(files: Sequence[RemoteFile], directory: Path) -> None:
    """All of them or none, also if several processes do it at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".new-", ignore_cleanup_errors=True) as new:
        for file in files:
            (Path(new) / file.name).write_bytes(file.read(0, file.size))
        with suppress(OSError):  # another process was faster
            os.rename(new, directory)
    if not directory.is_dir():
        raise InvalidRequest(f"{directory} cannot be written: set LORAFLEET_CACHE", param="model")
