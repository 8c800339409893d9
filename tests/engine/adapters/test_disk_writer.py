from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.adapters.disk_cache import Contents, DiskCache
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.files import AdapterListing
from engine.adapters.reader import FileReader
from engine.adapters.source import describe, open_reader
from tests.engine.adapters.adapter_dirs import write_adapter

WAIT_S = 20.0


class SlowCache(DiskCache):
    def __init__(self, root: str) -> None:
        super().__init__(root, 1 << 30)
        self.gate = threading.Event()
        self.started = threading.Event()
        self.written = threading.Event()
        self.error: Exception | None = None

    def write(self, listing: AdapterListing, contents: Contents, digests: Mapping[str, str]) -> bool:
        self.started.set()
        assert self.gate.wait(WAIT_S)
        try:
            if self.error:
                raise self.error
            return super().write(listing, contents, digests)
        finally:
            self.written.set()


@pytest.fixture
def cache(tmp_path: Path) -> SlowCache:
    return SlowCache(str(tmp_path / "disk"))


@pytest.fixture
def writer(cache: SlowCache) -> Iterator[DiskWriter]:
    before = set(threading.enumerate())
    writer = DiskWriter(cache, max_pending=1)
    yield writer
    cache.gate.set()
    writer.close()
    assert set(threading.enumerate()) <= before


def read(tmp_path: Path, name: str) -> FileReader:
    reader = open_reader(describe(str(write_adapter(tmp_path / name))))
    reader.read_small("adapter_config.json")
    return reader


def is_kept(cache: DiskCache, reader: FileReader) -> bool:
    folder = cache.open(reader.listing.uri, reader.listing.version)
    if folder is None:
        return False
    with folder:
        return True


def test_what_is_offered_is_written_later(writer: DiskWriter, cache: SlowCache, tmp_path: Path) -> None:
    reader = read(tmp_path, "a")
    writer.offer(reader)
    assert not is_kept(cache, reader)
    cache.gate.set()
    writer.close()
    assert is_kept(cache, reader)


def test_where_loads_outrun_the_disk_some_are_not_kept(
    writer: DiskWriter, cache: SlowCache, tmp_path: Path
) -> None:
    readers = [read(tmp_path, name) for name in "abc"]
    writer.offer(readers[0])
    assert cache.started.wait(WAIT_S)
    writer.offer(readers[1])
    writer.offer(readers[2])
    cache.gate.set()
    writer.close()
    assert [is_kept(cache, reader) for reader in readers] == [True, True, False]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/path"), RuntimeError("a fault of ours")],
)
def test_a_disk_that_fails_is_told_and_the_next_write_is_tried(
    error: Exception, writer: DiskWriter, cache: SlowCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-69."""
    reader = read(tmp_path, "a")
    cache.error = error
    cache.gate.set()
    with caplog.at_level(logging.ERROR):
        writer.offer(reader)
        while not caplog.records:
            time.sleep(0.01)
    assert "adapter 'a' is not kept on disk" in caplog.text
    if isinstance(error, OSError):
        assert "No space left on device" in caplog.text
        assert "/secret" not in caplog.text
    cache.error = None
    writer.offer(reader)
    writer.close()
    assert is_kept(cache, reader)


def test_a_trouble_that_lasts_is_told_once_and_again_after_it_was_over(
    writer: DiskWriter, cache: SlowCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-69: a full volume must not fill the log."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    cache.gate.set()
    for number, error in enumerate((full, full, full, None, full)):
        cache.error = error
        cache.written.clear()
        writer.offer(read(tmp_path, f"a{number}"))
        assert cache.written.wait(WAIT_S)
    writer.close()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "adapter 'a0' is not kept on disk",
        "adapter 'a4' is not kept on disk",
    ]


def test_too_little_room_is_told(
    writer: DiskWriter, cache: SlowCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache._capacity_bytes = 10
    cache.gate.set()
    writer.offer(read(tmp_path, "a"))
    writer.close()
    assert "no room in disk_cache_dir" in caplog.text
