"""What an adapter consists of at its source. Knows no kind of source.

Only the files named here are ever read; training leftovers beside them are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.errors import LorafleetError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"  # listed so that it can be refused; never read
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENIZER_FILE = "tokenizer.json"
_STEP_BYTES = 4 << 20  # between two looks at whether a read is still wanted
SUMS_FILE = "SHA256SUMS"  # optional, as `sha256sum * > SHA256SUMS` writes it
FILE_NAMES = frozenset(
    {
        CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, TEMPLATE_FILE,
        TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE, TOKENIZER_FILE, SUMS_FILE,
    }
)  # fmt: skip


class SourceChanged(Exception):
    """A file is no longer the one that was listed. The reader starts again from a new listing.

    `error`: what to tell when that happens again; None: that the files keep changing.
    """

    def __init__(self, error: LorafleetError | None = None) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, slots=True)
class AdapterFile:
    name: str
    size: int  # bytes
    etag: str  # changes with the content


@dataclass(frozen=True, slots=True)
class AdapterListing:
    name: str  # last part of the URI
    uri: str
    version: str  # changes when a file that is read may have changed
    files: tuple[AdapterFile, ...]  # by name

    def find(self, name: str) -> AdapterFile | None:
        return next((file for file in self.files if file.name == name), None)


def make_listing(name: str, uri: str, files: Iterable[AdapterFile]) -> AdapterListing:
    known = tuple(sorted((f for f in files if f.name in FILE_NAMES), key=lambda f: f.name))
    content = "\n".join(f"{f.name}\t{f.size}\t{f.etag}" for f in known)
    return AdapterListing(name, uri, hashlib.sha256(content.encode()).hexdigest()[:16], known)


def read_open_file(fd: int, offset: int, view: memoryview, check: Callable[[], None]) -> None:
    """Fill `view`; `check` as in `Folder.read`. Raises SourceChanged if the file ends before, or OSError."""
    done = 0
    while done < len(view):
        check()
        count = os.preadv(fd, [view[done : done + _STEP_BYTES]], offset + done)
        if count == 0:
            raise SourceChanged
        done += count


class Folder(Protocol):
    """One adapter at its source."""

    parallel_reads: int  # how many reads at once are faster than one

    def list_files(self) -> AdapterListing:
        """Raises ModelNotFound if no adapter is there."""

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        """Fill `view` from `offset`. Raises SourceChanged if the file is not the listed one any more.

        `check` is called now and then and raises when the read is no longer wanted.
        """
