"""What an adapter consists of at its source, and what is read of it. Knows no kind of source.

Only the files named here are ever read; training leftovers beside them are not. Small files are read at once,
the weights on demand: first their head, so that a bad adapter is refused before its bytes are moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from engine.errors import AdapterRefused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"  # listed so that it can be refused; never read
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"
TOKENIZER_FILE = "tokenizer.json"
FILE_NAMES = frozenset(
    {
        CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE, TEMPLATE_FILE,
        TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE, TOKENIZER_FILE,
    }
)  # fmt: skip

MAX_SMALL_FILE_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20


class SourceChanged(Exception):
    """A file is no longer the one that was listed. The reader starts again from a new listing."""


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


class Folder(Protocol):
    """One adapter at its source."""

    parallel_reads: int  # how many reads at once are faster than one

    def list_files(self) -> AdapterListing:
        """Raises ModelNotFound if no adapter is there."""

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        """Fill `view` from `offset`. Raises SourceChanged if the file is not the listed one any more.

        `check` is called now and then and raises when the read is no longer wanted.
        """


@dataclass(frozen=True, slots=True)
class FileReader:
    """Reads the files of one listing."""

    folder: Folder
    listing: AdapterListing
    check: Callable[[], None]

    def read_small(self, name: str) -> bytes | None:
        """The file; None if there is none. Raises AdapterRefused if it is too large."""
        file = self.listing.find(name)
        if file is None:
            return None
        if file.size > MAX_SMALL_FILE_BYTES:
            raise AdapterRefused(
                f"{name} has {file.size} bytes, at most {MAX_SMALL_FILE_BYTES} are read", param=name
            )
        return self.read_head(name, file.size)

    def read_head(self, name: str, num_bytes: int) -> bytes:
        """The first `num_bytes` of a file, or all of it."""
        file = self._file(name)
        buffer = bytearray(min(num_bytes, file.size))
        self.folder.read(file, 0, memoryview(buffer), self.check)
        return bytes(buffer)

    def read_all(self, name: str, head: bytes = b"") -> bytearray:
        """A large file, in parallel chunks into one buffer. `head`: its first bytes, read before."""
        file = self._file(name)
        buffer = bytearray(file.size)
        buffer[: len(head)] = head
        offsets = range(len(head), file.size, CHUNK_BYTES)

        def read_chunk(offset: int) -> None:
            self.check()
            view = memoryview(buffer)[offset : offset + CHUNK_BYTES]
            self.folder.read(file, offset, view, self.check)

        num_threads = min(self.folder.parallel_reads, len(offsets))
        if num_threads <= 1:
            for offset in offsets:
                read_chunk(offset)
            return buffer
        threads = ThreadPoolExecutor(num_threads, "adapter-read")
        try:
            for chunk in [threads.submit(read_chunk, offset) for offset in offsets]:
                chunk.result()
        finally:
            # one failed chunk fails the file: do not start the others
            threads.shutdown(cancel_futures=True)
        return buffer

    def size(self, name: str) -> int:
        return self._file(name).size

    def _file(self, name: str) -> AdapterFile:
        file = self.listing.find(name)
        assert file is not None, name
        return file
