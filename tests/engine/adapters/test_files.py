from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine.adapters.files import CHUNK_BYTES, AdapterFile, AdapterListing, FileReader, make_listing
from engine.errors import AdapterRefused, Unavailable

WEIGHTS = "adapter_model.safetensors"


class MemoryFolder:
    """Serves one byte per block number, so that a misplaced range shows."""

    def __init__(self, parallel_reads: int, broken_at: int | None = None) -> None:
        self.parallel_reads = parallel_reads
        self.broken_at = broken_at
        self.lock = threading.Lock()
        self.offsets: list[int] = []
        self.running = 0
        self.most_running = 0

    def list_files(self) -> AdapterListing:
        raise AssertionError("not called")

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        with self.lock:
            self.offsets.append(offset)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        check()
        try:
            if offset == self.broken_at:
                raise Unavailable("broken")
            view[:] = bytes([offset // (1 << 20) % 251]) * len(view)
        finally:
            with self.lock:
                self.running -= 1


def reader(folder: MemoryFolder, size: int, name: str = WEIGHTS) -> FileReader:
    listing = make_listing("a", "dir/a", [AdapterFile(name, size, "1")])
    return FileReader(folder, listing, lambda: None)


@pytest.mark.parametrize("parallel_reads", [1, 4])
@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5 * CHUNK_BYTES + 3])
def test_a_large_file_is_put_together_from_its_ranges(parallel_reads: int, size: int) -> None:
    folder = MemoryFolder(parallel_reads)
    files = reader(folder, size)
    head = files.read_head(WEIGHTS, 1 << 20)
    content = files.read_all(WEIGHTS, head)
    assert len(content) == size
    starts = [0, *range(len(head), size, CHUNK_BYTES)]
    for start, stop in zip(starts, [*starts[1:], size], strict=True):
        assert content[start:stop] == bytes([start // (1 << 20) % 251]) * (stop - start)
    assert sorted(set(folder.offsets)) == sorted({0, *starts} - {size} | {0})
    assert folder.most_running <= parallel_reads


def test_one_range_that_fails_fails_the_file_and_starts_no_more() -> None:
    folder = MemoryFolder(2, broken_at=0)
    with pytest.raises(Unavailable):
        reader(folder, 20 * CHUNK_BYTES).read_all(WEIGHTS)
    assert len(folder.offsets) < 20
    assert folder.running == 0


def test_a_small_file_above_its_bound_is_refused_unread() -> None:
    folder = MemoryFolder(1)
    with pytest.raises(AdapterRefused) as caught:
        reader(folder, (1 << 20) + 1, "adapter_config.json").read_small("adapter_config.json")
    assert caught.value.param == "adapter_config.json"
    assert folder.offsets == []
    assert reader(folder, 1 << 20, "adapter_config.json").read_small("adapter_config.json") is not None


def test_an_absent_small_file_is_none() -> None:
    assert reader(MemoryFolder(1), 1).read_small("chat_template.jinja") is None


def test_the_version_depends_on_what_is_read_and_on_nothing_else() -> None:
    files = [AdapterFile("adapter_config.json", 1, "x"), AdapterFile(WEIGHTS, 2, "y")]
    version = make_listing("a", "u", files).version
    assert make_listing("b", "v", [*reversed(files), AdapterFile("optimizer.pt", 3, "z")]).version == version
    for changed in (AdapterFile(WEIGHTS, 3, "y"), AdapterFile(WEIGHTS, 2, "z")):
        assert make_listing("a", "u", [files[0], changed]).version != version
