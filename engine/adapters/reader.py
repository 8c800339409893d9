"""Reads the files of one adapter: small ones whole, the weights in parallel chunks into one buffer.

The weights are read on demand, first their head, so that a bad adapter is refused before its bytes are moved.
While chunks arrive, those that are there are hashed, and may be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from types import TracebackType

from engine.adapters.files import SUMS_FILE, AdapterFile, AdapterListing, Folder, SourceChanged
from engine.adapters.host_buffer import new_buffer
from engine.adapters.sha256sums import parse_sums
from engine.errors import AdapterRefused, Unavailable

MAX_SMALL_FILE_BYTES = 1 << 20
MIN_CHUNK_BYTES = 2 << 20
MAX_CHUNK_BYTES = 8 << 20


class FileReader:
    """Reads each file of one listing once, and remembers what it read."""

    def __init__(
        self,
        folder: Folder,
        listing: AdapterListing,
        check: Callable[[], None] = lambda: None,  # called during all reads; what it raises ends them
        digests: Mapping[str, str] | None = None,  # SHA-256 that files must have, beside those of SHA256SUMS
    ) -> None:
        self.listing = listing
        self._folder = folder
        self._check = check
        self._digests = digests or {}
        self._read: dict[str, bytes | memoryview] = {}
        self.sha256: dict[str, str] = {}  # of whole files that were read

    @property
    def contents(self) -> Mapping[str, bytes | memoryview]:
        """The start of each file, as far as it was read."""
        return self._read

    def prefetch(self, lengths: Mapping[str, int]) -> None:
        """The first bytes of several files at once: a source far away takes its time for each answer."""
        present = {name: length for name, length in lengths.items() if self.listing.find(name)}
        if self._folder.parallel_reads == 1:
            return
        with ThreadPoolExecutor(len(present), "adapter-read") as threads:
            reads = [threads.submit(self.read_head, name, length) for name, length in present.items()]
        for read in reads:
            read.result()

    def read_small(self, name: str) -> bytes | None:
        """The file; None if there is none. Raises AdapterRefused if it is too large."""
        file = self.listing.find(name)
        if file is None:
            return None
        if file.size > MAX_SMALL_FILE_BYTES:
            raise AdapterRefused(
                f"{name} has {file.size} bytes, at most {MAX_SMALL_FILE_BYTES} are read", param=name
            )
        content = self.read_head(name, file.size)
        if name != SUMS_FILE:
            self.verify(name, hashlib.sha256(content).hexdigest())
        return content

    def read_head(self, name: str, num_bytes: int) -> bytes:
        """The first `num_bytes` of a file, or all of it."""
        file = self._file(name)
        wanted = min(num_bytes, file.size)
        head = self._read.get(name)
        if head is None or len(head) < wanted:
            buffer = bytearray(wanted)
            self._folder.read(file, 0, memoryview(buffer), self._check)
            head = self._read[name] = bytes(buffer)
        return bytes(head[:wanted])

    def start_read(self, name: str) -> LargeRead:
        """Of the whole file. What was read of it before is not read again."""
        read = LargeRead(self._folder, self._file(name), self._read.get(name, b""), self._check)
        self._read[name] = read.buffer
        return read

    def verify(self, name: str, digest: str) -> None:
        """Raises SourceChanged if a whole file does not have the SHA-256 that it must have."""
        self.sha256[name] = digest
        if digest != self._expected.get(name, digest):
            message = f"{name} does not have the SHA-256 that is stated for it"
            raise SourceChanged(AdapterRefused(message, param=name))

    def size(self, name: str) -> int:
        return self._file(name).size

    @cached_property
    def _expected(self) -> Mapping[str, str]:
        sums = self.read_small(SUMS_FILE)
        return {**(parse_sums(sums) if sums else {}), **self._digests}

    def _file(self, name: str) -> AdapterFile:
        file = self.listing.find(name)
        assert file is not None, name
        return file


class LargeRead:
    """A file on its way into one buffer. To be closed, which ends what is still being read."""

    def __init__(
        self, folder: Folder, file: AdapterFile, head: bytes | memoryview, check: Callable[[], None]
    ) -> None:
        """`head`: the file's first bytes, read before."""
        self.buffer = new_buffer(file.size)
        self.buffer[: len(head)] = head
        self._folder = folder
        self._file = file
        self._check = check
        self._error: BaseException | None = None  # that ends all reads of chunks
        self._chunk_bytes = chunk_bytes(file.size - len(head), folder.parallel_reads)
        self._starts = range(len(head), file.size, self._chunk_bytes)
        self._num_there = 0  # chunks, seen by `wait`
        self._threads = ThreadPoolExecutor(folder.parallel_reads, "adapter-read")
        self._chunks = [self._threads.submit(self._read_chunk, start) for start in self._starts]
        self._hash_thread = ThreadPoolExecutor(1, "adapter-hash")
        self._sha256: Future[str] = self._hash_thread.submit(self._hash, len(head))

    def __enter__(self) -> LargeRead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, stop: int) -> None:
        """Until all bytes before `stop` are there. Raises what a read of them raised."""
        while self._num_there < len(self._starts) and self._starts[self._num_there] < stop:
            self._chunks[self._num_there].result()
            self._num_there += 1

    def sha256(self) -> str:
        """Of the whole file, in hexadecimal digits; waits for all of it."""
        self.wait(len(self.buffer))
        return self._sha256.result()

    def close(self) -> None:
        self._error = self._error or Unavailable("the read was given up")
        self._threads.shutdown(cancel_futures=True)
        self._hash_thread.shutdown()

    def _read_chunk(self, start: int) -> None:
        try:
            self._check_wanted()
            view = self.buffer[start : start + self._chunk_bytes]
            self._folder.read(self._file, start, view, self._check_wanted)
        except BaseException as error:
            self._error = self._error or error
            raise

    def _check_wanted(self) -> None:
        if self._error is not None:
            raise self._error
        self._check()

    def _hash(self, head_bytes: int) -> str:
        digest = hashlib.sha256(self.buffer[:head_bytes])
        for start, chunk in zip(self._starts, self._chunks, strict=True):
            chunk.result()
            digest.update(self.buffer[start : start + self._chunk_bytes])
        return digest.hexdigest()


def chunk_bytes(num_bytes: int, parallel_reads: int) -> int:
    """All chunks of one size, as many for each of the parallel reads: none of these idles at the end."""
    rounds = -(-num_bytes // (parallel_reads * MAX_CHUNK_BYTES)) or 1
    return max(MIN_CHUNK_BYTES, -(-num_bytes // (parallel_reads * rounds)))
