"""Readers that share loads: the idlest one is asked, and what it raises is the caller's."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.adapters.host_memory import HostArena
from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import WantedImage
from engine.adapters.reader_pool import ReaderPool, start_readers
from engine.adapters.remote_reader import RemoteReader
from engine.config import EngineConfig
from engine.errors import Unavailable
from tests.engine.adapters.adapter_dirs import FORMAT, lora_tensors, write_adapter
from tests.engine.adapters.test_remote_reader import assert_same


class SlowReader:
    """Reads until it may end."""

    is_resting = False

    def __init__(self) -> None:
        self.reading: list[str] = []
        self.may_end = threading.Event()
        self.has_begun = threading.Semaphore(0)
        self.is_closed = False

    def read(self, wanted: WantedImage) -> AdapterImage:
        self.reading.append(wanted.uri)
        self.has_begun.release()
        assert self.may_end.wait(10)
        raise Unavailable(wanted.uri)

    def close(self) -> None:
        self.is_closed = True


def test_the_idlest_one_reads() -> None:
    readers = [SlowReader() for _ in range(3)]
    pool = ReaderPool(readers)
    errors: list[str] = []

    def read(uri: str) -> threading.Thread:
        def run() -> None:
            with pytest.raises(Unavailable) as caught:
                pool.read(WantedImage(uri, None, FORMAT))
            errors.append(str(caught.value))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    threads = []
    for i in range(5):
        threads.append(read(str(i)))
        assert readers[i % 3].has_begun.acquire(timeout=10)
    readers[2].may_end.set()
    threads[2].join()
    threads.append(read("5"))
    assert readers[2].has_begun.acquire(timeout=10)
    for reader in readers:
        reader.may_end.set()
    for thread in threads:
        thread.join()
    assert [reader.reading for reader in readers] == [["0", "3"], ["1", "4"], ["2", "5"]]
    assert sorted(errors) == ["0", "1", "2", "3", "4", "5"]
    pool.close()
    assert all(reader.is_closed for reader in readers)


def test_one_whose_process_keeps_ending_is_left_alone_while_others_can_read() -> None:
    """It fails its loads at once, and so always looked like the idlest."""
    readers = [SlowReader() for _ in range(3)]
    pool = ReaderPool(readers)
    for reader in readers:
        reader.may_end.set()
    for num_resting, expected in ((1, 1), (2, 2), (3, 0)):
        readers[num_resting - 1].is_resting = True
        with pytest.raises(Unavailable):
            pool.read(WantedImage("a", None, FORMAT))
        assert readers[expected].reading == ["a"]


def test_processes_share_one_arena(tmp_path: Path) -> None:
    tensors = lora_tensors()
    paths = [
        write_adapter(tmp_path / str(i), {name: tensor * (i + 1) for name, tensor in tensors.items()})
        for i in range(6)
    ]
    pool = ReaderPool([RemoteReader(EngineConfig(model="unused")) for _ in range(2)])
    form = replace(FORMAT, arena=HostArena(FORMAT.page_elems, FORMAT.dtype))
    images: dict[Path, AdapterImage] = {}

    def read(path: Path) -> None:
        images[path] = pool.read(WantedImage(str(path), None, form))

    try:
        threads = [threading.Thread(target=read, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pool.close()
    for path in paths:
        assert_same(images[path], path)


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "expected"), [(2, 1, 1), (8, 1, 2), (64, 1, 4), (9, 2, 1)]
)
def test_a_rank_has_as_many_as_there_are_cores_for(
    num_cores: int, num_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = []

    class Reader(SlowReader):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__()
            pending.append(config.max_parallel_loads)

    cores: Callable[[int], set[int]] = lambda pid: set(range(num_cores))  # noqa: E731
    monkeypatch.setattr(os, "sched_getaffinity", cores)
    monkeypatch.setattr("engine.adapters.reader_pool.RemoteReader", Reader)
    reader = start_readers(EngineConfig(model="unused", tensor_parallel_size=num_ranks))
    assert (len(reader._readers) if isinstance(reader, ReaderPool) else 1) == expected
    # adapters that wait in memory until they are written to disk
    assert sum(pending) == EngineConfig(model="unused").max_parallel_loads
