from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.adapters.files import (
    SUMS_FILE,
    AdapterFile,
    AdapterListing,
    SourceChanged,
    make_listing,
)
from engine.adapters.reader import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, FileReader, chunk_bytes
from engine.errors import AdapterRefused, Unavailable

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
WAIT_S = 20.0


class MemoryFolder:
    """Files in memory; reads of one offset can be made to wait or to fail."""

    def __init__(self, parallel_reads: int = 4, **files: bytes) -> None:
        self.parallel_reads = parallel_reads
        self.files = {name.replace("__", "."): content for name, content in files.items()}
        self.gates: dict[int, threading.Event] = {}
        self.broken_at: int | None = None
        self.lock = threading.Lock()
        self.reads: list[tuple[str, int]] = []
        self.running = 0
        self.most_running = 0

    def list_files(self) -> AdapterListing:
        files = [AdapterFile(name, len(content), "1") for name, content in self.files.items()]
        return make_listing("a", "dir/a", files)

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        with self.lock:
            self.reads.append((file.name, offset))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            while offset in self.gates and not self.gates[offset].wait(0.01):
                check()
            check()
            if offset == self.broken_at:
                raise Unavailable("broken")
            view[:] = self.files[file.name][offset : offset + len(view)]
        finally:
            with self.lock:
                self.running -= 1


def make_content(num_bytes: int) -> bytes:
    """Every range differs from every other, so that a misplaced one shows."""
    block = hashlib.shake_256(b"content").digest(1 << 20)
    blocks = (index.to_bytes(4, "little") + block[4:] for index in range(-(-num_bytes // len(block))))
    return b"".join(blocks)[:num_bytes]


def weights(num_bytes: int, parallel_reads: int = 4) -> MemoryFolder:
    return MemoryFolder(parallel_reads, adapter_model__safetensors=make_content(num_bytes))


def reader(folder: MemoryFolder, check: Callable[[], None] = lambda: None) -> FileReader:
    return FileReader(folder, folder.list_files(), check)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("parallel_reads", [1, 4])
@pytest.mark.parametrize("head", [0, 1 << 20, 3 << 20])
@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5 * MAX_CHUNK_BYTES + 3])
def test_a_large_file_is_put_together_from_its_ranges(parallel_reads: int, head: int, size: int) -> None:
    folder = weights(size, parallel_reads)
    files = reader(folder)
    files.read_head(WEIGHTS, head)
    with files.start_read(WEIGHTS) as read:
        read.wait(size)
        assert read.buffer == folder.files[WEIGHTS]
        assert read.sha256() == hashlib.sha256(folder.files[WEIGHTS]).hexdigest()
    rest = size - min(head, size)
    starts = range(min(head, size), size, chunk_bytes(rest, parallel_reads))
    assert sorted(offset for _, offset in folder.reads) == [0, *starts]
    assert folder.most_running <= parallel_reads
    assert files.contents[WEIGHTS] == folder.files[WEIGHTS]


@pytest.mark.parametrize(
    ("num_bytes", "parallel_reads", "want"),
    [
        (0, 8, MIN_CHUNK_BYTES),
        (MIN_CHUNK_BYTES + 1, 8, MIN_CHUNK_BYTES),
        (64 << 20, 8, 8 << 20),
        (80 << 20, 8, 5 << 20),  # two rounds of eight, not one and a quarter
        (80 << 20, 1, 8 << 20),
        ((64 << 20) + 1, 8, (4 << 20) + 1),
    ],
)
def test_chunks_are_spread_evenly(num_bytes: int, parallel_reads: int, want: int) -> None:
    assert chunk_bytes(num_bytes, parallel_reads) == want


def test_what_is_there_can_be_used_while_the_rest_is_on_its_way() -> None:
    folder = weights(3 * MAX_CHUNK_BYTES, parallel_reads=3)
    folder.gates[2 * MAX_CHUNK_BYTES] = threading.Event()
    with reader(folder).start_read(WEIGHTS) as read:
        read.wait(2 * MAX_CHUNK_BYTES)
        assert read.buffer[: 2 * MAX_CHUNK_BYTES] == folder.files[WEIGHTS][: 2 * MAX_CHUNK_BYTES]
        folder.gates[2 * MAX_CHUNK_BYTES].set()
        read.wait(2 * MAX_CHUNK_BYTES + 1)
        assert read.buffer == folder.files[WEIGHTS]


def test_one_range_that_fails_fails_the_file_and_starts_no_more() -> None:
    folder = weights(20 * MAX_CHUNK_BYTES, parallel_reads=2)
    folder.broken_at = 0
    folder.gates[MAX_CHUNK_BYTES] = threading.Event()  # the other thread waits until it is told to end
    with pytest.raises(Unavailable, match="broken"), reader(folder).start_read(WEIGHTS) as read:
        read.wait(1)
    assert len(folder.reads) <= 2
    assert folder.running == 0
    with pytest.raises(Unavailable, match="broken"):
        read.sha256()


def test_a_read_that_is_closed_ends_at_once() -> None:
    folder = weights(4 * MAX_CHUNK_BYTES)
    folder.gates = {start: threading.Event() for start in range(0, 4 * MAX_CHUNK_BYTES, MAX_CHUNK_BYTES)}
    reader(folder).start_read(WEIGHTS).close()
    assert folder.running == 0


def test_what_a_check_raises_ends_the_read() -> None:
    def check() -> None:
        raise Unavailable("unwanted")

    with (
        pytest.raises(Unavailable, match="unwanted"),
        reader(weights(2 * MAX_CHUNK_BYTES), check).start_read(WEIGHTS) as read,
    ):
        read.wait(1)


def test_first_reads_are_made_at_once_where_an_answer_takes_its_time() -> None:
    folder = MemoryFolder(4, adapter_config__json=b"{}", chat_template__jinja=b"x", tokenizer__json=b"[]")
    folder.gates[0] = threading.Event()
    files = reader(folder)

    def open_gate_when_both_wait() -> None:
        while folder.running < 2:
            pass
        folder.gates[0].set()

    opener = threading.Thread(target=open_gate_when_both_wait)
    opener.start()
    files.prefetch({CONFIG: 100, "chat_template.jinja": 1, WEIGHTS: 100})
    opener.join()
    assert files.read_small(CONFIG) == b"{}"
    assert files.read_small("chat_template.jinja") == b"x"
    assert sorted(name for name, _ in folder.reads) == [CONFIG, "chat_template.jinja"]


def test_no_file_is_read_twice() -> None:
    folder = MemoryFolder(1, adapter_config__json=b"{}", adapter_model__safetensors=make_content(100))
    files = reader(folder)
    for _ in range(2):
        files.read_small(CONFIG)
        files.read_head(WEIGHTS, 50)
        files.read_head(WEIGHTS, 10)
    assert files.read_head(WEIGHTS, 200) == folder.files[WEIGHTS]
    assert folder.reads == [(CONFIG, 0), (WEIGHTS, 0), (WEIGHTS, 0)]


def test_a_small_file_above_its_bound_is_refused_unread() -> None:
    folder = MemoryFolder(adapter_config__json=bytes((1 << 20) + 1))
    with pytest.raises(AdapterRefused) as caught:
        reader(folder).read_small(CONFIG)
    assert caught.value.param == CONFIG
    assert folder.reads == []
    folder.files[CONFIG] = bytes(1 << 20)
    assert reader(folder).read_small(CONFIG) is not None


def test_an_absent_small_file_is_none() -> None:
    assert reader(weights(1)).read_small("chat_template.jinja") is None


def sums_of(**files: bytes) -> bytes:
    lines = (
        f"{hashlib.sha256(content).hexdigest()}  {name.replace('__', '.')}" for name, content in files.items()
    )
    return "\n".join(lines).encode()


def test_files_are_held_against_sha256sums() -> None:
    sums = sums_of(adapter_config__json=b"{}", adapter_model__safetensors=b"w", absent=b"")
    folder = MemoryFolder(adapter_config__json=b"{}", adapter_model__safetensors=b"w", SHA256SUMS=sums)
    files = reader(folder)
    assert files.read_small(CONFIG) == b"{}"
    with files.start_read(WEIGHTS) as read:
        files.verify(WEIGHTS, read.sha256())
    files.verify("chat_template.jinja", "0" * 64)  # not stated
    for name, content in ((CONFIG, b"[]"), (WEIGHTS, b"x")):
        with pytest.raises(SourceChanged) as caught:
            files.verify(name, hashlib.sha256(content).hexdigest())
        assert isinstance(caught.value.error, AdapterRefused)
        assert caught.value.error.param == name
        assert name in caught.value.error.message


def test_a_small_file_is_verified_when_it_is_read() -> None:
    folder = MemoryFolder(adapter_config__json=b"{}", SHA256SUMS=sums_of(adapter_config__json=b"[]"))
    with pytest.raises(SourceChanged):
        reader(folder).read_small(CONFIG)


def test_digests_that_the_caller_knows_win() -> None:
    folder = MemoryFolder(adapter_config__json=b"{}")
    files = FileReader(folder, folder.list_files(), digests={CONFIG: "0" * 64})
    with pytest.raises(SourceChanged):
        files.read_small(CONFIG)


def test_the_version_depends_on_what_is_read_and_on_nothing_else() -> None:
    files = [AdapterFile(CONFIG, 1, "x"), AdapterFile(WEIGHTS, 2, "y")]
    version = make_listing("a", "u", files).version
    assert make_listing("b", "v", [*reversed(files), AdapterFile("optimizer.pt", 3, "z")]).version == version
    for changed in (AdapterFile(WEIGHTS, 3, "y"), AdapterFile(WEIGHTS, 2, "z")):
        assert make_listing("a", "u", [files[0], changed]).version != version
    assert make_listing("a", "u", [*files, AdapterFile(SUMS_FILE, 1, "s")]).version != version
