from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.adapters import disk_cache
from engine.adapters.disk_cache import LOW_WATER, DiskCache
from engine.adapters.files import CONFIG_FILE, WEIGHTS_FILE, AdapterFile, SourceChanged, make_listing
from tests.engine.adapters import disk_process
from tests.engine.adapters.disk_process import content, listing, read, write

ENTRY_BYTES = 300_000 // 4096 * 4096 + 2 * 4096  # of number 2 and every fourth behind it, with entry.json
WAIT_S = 60.0


def entries(cache: DiskCache) -> list[Path]:
    return list(cache._entries.iterdir())


def temporary(cache: DiskCache) -> list[Path]:
    return list(cache._tmp.iterdir())


def clock(cache: DiskCache, *numbers: int) -> None:
    """They were used in this order, long ago."""
    for index, number in enumerate(numbers):
        os.utime(cache._path(listing(number).uri, listing(number).version), (index, index))


def test_what_was_written_is_read_by_any_process(tmp_path: Path) -> None:
    assert write(DiskCache(str(tmp_path), 1 << 30), 2)
    cache = DiskCache(str(tmp_path), 1 << 30)
    assert read(cache, 2)
    assert not read(cache, 3)
    assert cache.used_bytes == ENTRY_BYTES
    assert temporary(cache) == []


def test_another_version_or_uri_is_another_entry(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30)
    write(cache, 2)
    assert cache.open(listing(2).uri, "other") is None
    assert cache.open("s3://b/other", listing(2).version) is None


def test_a_file_of_which_the_start_was_read_is_kept_so_far(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30)
    files = [AdapterFile(CONFIG_FILE, 2, "x"), AdapterFile("tokenizer.json", 100, "y")]
    found = make_listing("a", "s3://b/a", files)
    cache.write(found, {CONFIG_FILE: b"{}", "tokenizer.json": b"0123456789"}, {})
    folder = cache.open(found.uri, found.version)
    assert folder is not None
    with folder:
        assert folder.list_files() == found
        buffer = bytearray(10)
        folder.read(found.files[1], 0, memoryview(buffer), lambda: None)
        assert buffer == b"0123456789"
        for offset, size in ((0, 11), (10, 1)):
            with pytest.raises(SourceChanged):
                folder.read(found.files[1], offset, memoryview(bytearray(size)), lambda: None)
        with pytest.raises(SourceChanged):
            folder.read(AdapterFile(WEIGHTS_FILE, 1, ""), 0, memoryview(bytearray(1)), lambda: None)


def test_the_entry_used_longest_ago_goes_first_down_to_the_low_water(tmp_path: Path) -> None:
    """FR-69."""
    cache = DiskCache(str(tmp_path), 20 * ENTRY_BYTES)
    numbers = range(2, 2 + 4 * 20, 4)
    for number in numbers:
        assert write(cache, number)
    clock(cache, *numbers)
    assert read(cache, 2)  # now it was used
    assert cache.used_bytes == 20 * ENTRY_BYTES
    assert write(cache, 82)
    assert [number for number in (*numbers, 82) if not read(cache, number)] == [6, 10, 14]
    assert cache.used_bytes == LOW_WATER * 20 * ENTRY_BYTES


def test_five_adapters_rotate_in_room_for_three(tmp_path: Path) -> None:
    """FR-69."""
    cache = DiskCache(str(tmp_path), 3 * ENTRY_BYTES)
    for round_ in range(20):
        number = 2 + 4 * (round_ % 5)
        assert read(cache, number) or write(cache, number)
        assert read(cache, number)
        assert cache.used_bytes <= 3 * ENTRY_BYTES
        assert temporary(cache) == []


def test_what_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    """FR-69."""
    cache = DiskCache(str(tmp_path), 2 * ENTRY_BYTES)
    write(cache, 2)
    write(cache, 6)
    clock(cache, 2, 6)
    folder = cache.open(listing(2).uri, listing(2).version)
    assert folder is not None
    with folder:
        clock(cache, 2, 6)
        assert write(cache, 10)
        assert not read(cache, 6)
        buffer = bytearray(len(content(2)))
        folder.read(folder.listing.files[0], 0, memoryview(buffer), lambda: None)
        assert buffer == content(2)
        other = cache.open(listing(10).uri, listing(10).version)
        assert other is not None
        with other:
            assert not write(cache, 14), "nothing may go"
    assert write(cache, 14)


def test_an_adapter_larger_than_the_cache_evicts_nothing(tmp_path: Path) -> None:
    cache = DiskCache(str(tmp_path), 2 * ENTRY_BYTES)
    write(cache, 2)
    assert not write(cache, 3)
    assert read(cache, 2)
    assert temporary(cache) == []


def truncate(entry: Path) -> None:
    os.truncate(entry / WEIGHTS_FILE, 100)


def lose_weights(entry: Path) -> None:
    (entry / WEIGHTS_FILE).unlink()


def link_elsewhere(entry: Path) -> None:
    lose_weights(entry)
    (entry / WEIGHTS_FILE).symlink_to("/etc/passwd")


def lose_facts(entry: Path) -> None:
    (entry / "entry.json").unlink()


def other_facts(entry: Path) -> None:
    facts = json.loads((entry / "entry.json").read_text())
    (entry / "entry.json").write_text(json.dumps(facts | {"uri": "s3://b/other"}))


@pytest.mark.parametrize("damage", [truncate, lose_weights, link_elsewhere, lose_facts, other_facts])
@pytest.mark.parametrize("facts", [None, b"", b"[]", b"{", b'{"files": [{}]}', b"\xff"])
def test_a_damaged_entry_is_none_and_is_removed(
    damage: Callable[[Path], None], facts: bytes | None, tmp_path: Path
) -> None:
    """FR-63."""
    cache = DiskCache(str(tmp_path), 1 << 30)
    write(cache, 2)
    (entry,) = entries(cache)
    damage(entry)
    if facts is not None:
        (entry / "entry.json").write_bytes(facts)
    assert not read(cache, 2)
    assert entries(cache) == []
    assert write(cache, 2)
    assert read(cache, 2)


def fail(number: int) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("call", ["posix_fallocate", "fsync"])
def test_a_disk_that_fails_is_an_error_and_nothing_is_left(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-69."""
    cache = DiskCache(str(tmp_path), 1 << 30)
    write(cache, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            write(cache, 6)
    assert temporary(cache) == []
    assert read(cache, 2)
    assert not read(cache, 6)
    assert write(cache, 6)


def test_a_volume_that_others_fill_takes_room_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-69."""
    cache = DiskCache(str(tmp_path), 1 << 30)
    for number in (2, 6, 10):
        write(cache, number)
    clock(cache, 2, 6, 10)
    volume = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: volume)
    assert write(cache, 14)
    assert [number for number in (2, 6, 10, 14) if not read(cache, number)] == [2, 6]
    for entry in entries(cache):
        DiskCache(str(tmp_path), 0)._evict(entry)
    assert not write(cache, 2), "nothing is left that could go"
    assert temporary(cache) == []


def test_room_that_another_process_has_made_is_not_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = (DiskCache(str(tmp_path), 3 * ENTRY_BYTES) for _ in range(2))
    assert write(cache, 2)
    assert write(cache, 6)
    used: list[int] = []
    real_allocate = disk_cache._allocate

    def allocate(path: Path, num_bytes: int) -> None:
        """The other one makes room before this one has taken its own."""
        monkeypatch.setattr(disk_cache, "_allocate", real_allocate)
        assert write(other, 10)
        used.append(other.used_bytes)
        real_allocate(path, num_bytes)

    monkeypatch.setattr(disk_cache, "_allocate", allocate)
    assert write(cache, 14)
    assert max(*used, cache.used_bytes) <= 3 * ENTRY_BYTES
    assert read(cache, 10)
    assert read(cache, 14)


def test_what_is_published_while_bytes_are_counted_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30)
    written = cache._tmp / "entry-4096"
    written.mkdir()
    (written / WEIGHTS_FILE).write_bytes(bytes(4096))
    real_children = disk_cache._children

    def children(path: Path) -> list[Path]:
        found = real_children(path)
        if written.exists():
            written.rename(cache._entries / "entry")
        return found

    monkeypatch.setattr(disk_cache, "_children", children)
    assert cache.used_bytes >= 4096


def test_of_two_that_write_the_same_the_second_adds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(str(tmp_path), 1 << 30)
    real_fsync = os.fsync
    other = DiskCache(str(tmp_path), 1 << 30)

    def fsync(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", real_fsync)
        write(other, 2)  # is ready first
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert write(cache, 2)
    assert len(entries(cache)) == 1
    assert temporary(cache) == []
    assert read(cache, 2)


def start(root: Path, capacity: int, seed: int, steps: int) -> subprocess.Popen[str]:
    arguments = [str(root), str(capacity), str(seed), str(steps)]
    process = subprocess.Popen(
        [sys.executable, "-m", disk_process.__name__, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.cluster
def test_processes_share_one_directory(tmp_path: Path) -> None:
    """FR-63: each reads only what is whole; together they stay within the bound."""
    capacity = 2_000_000
    processes = [start(tmp_path, capacity, seed, steps=300) for seed in range(3)]
    for process in processes:
        out, _ = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "done\n")
    cache = DiskCache(str(tmp_path), capacity)
    assert 0 < cache.used_bytes <= capacity
    assert temporary(cache) == []


@pytest.mark.cluster
def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    """FR-63: kill -9 at any moment."""
    capacity = 2_000_000
    cache = DiskCache(str(tmp_path), capacity)
    rng = random.Random(1)
    num_left = 0
    for seed in range(12):
        process = start(tmp_path, capacity, seed, steps=1_000_000)
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=WAIT_S)
        num_left += len(temporary(cache))
        for number in range(disk_process.NUM_ADAPTERS):
            read(cache, number)  # raises if it is not whole
        cache.discard(listing(0).uri, listing(0).version)
        assert write(cache, 0)
        assert temporary(cache) == []
        assert cache.used_bytes <= capacity
    assert num_left, "no process was killed while it wrote: this test shows nothing"
