"""Several processes that read adapters, where there are cores for them.

In a storm from a local S3 one moved 0.54 GB/s, its GIL seems to be what it ran out of; four moved 1.6, and
1.93 without the storm's requests (`python -m load_tests.s3_storm`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import ImageReader, WantedImage
from engine.adapters.remote_reader import RemoteReader
from engine.config import EngineConfig

MAX_READERS = 4
CORES_EACH = 4  # for each rank: the step loop, HTTP and others want some too


def start_readers(config: EngineConfig) -> ImageReader:
    """Of one rank."""
    num_cores = len(os.sched_getaffinity(0)) // config.tensor_parallel_size
    num_readers = min(max(num_cores // CORES_EACH, 1), MAX_READERS, config.max_parallel_loads)
    # each keeps so many adapters in memory until they are on disk
    share = replace(config, max_parallel_loads=-(-config.max_parallel_loads // num_readers))
    readers = [RemoteReader(share) for _ in range(num_readers)]
    return readers[0] if num_readers == 1 else ReaderPool(readers)


class PooledReader(ImageReader, Protocol):
    @property
    def is_resting(self) -> bool:
        """For a while its loads fail at once."""


class ReaderPool:
    def __init__(self, readers: Sequence[PooledReader]) -> None:
        self._readers = readers
        self._lock = threading.Lock()  # over what follows
        self._num_loads = [0] * len(readers)

    def read(self, wanted: WantedImage) -> AdapterImage:
        """By the one that has least to do."""
        with self._lock:
            chosen = min(range(len(self._readers)), key=self._burden)
            self._num_loads[chosen] += 1
        try:
            return self._readers[chosen].read(wanted)
        finally:
            with self._lock:
                self._num_loads[chosen] -= 1

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._readers)) as executor:
            list(executor.map(lambda reader: reader.close(), self._readers))

    def _burden(self, index: int) -> tuple[bool, int]:
        return self._readers[index].is_resting, self._num_loads[index]
