"""Copies parts of a checkpoint's tensors to where they belong, some pieces at a time.

What is in flight is at most `threads` pieces of PIECE_BYTES, and of tensors that ranks read for each other
LOOKAHEAD + 1 times 1/N of a tensor.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from tqdm import tqdm

from engine.model.checkpoint_tensors import StoredTensor

PIECE_BYTES = 8 << 20
LOOKAHEAD = 2
LOG_PERIOD_S = 10.0

logger = logging.getLogger(__name__)


class WeightReader:
    """A context manager; what was not read when it ends in an error is given up."""

    def __init__(self, label: str, num_threads: int) -> None:
        """`label`: whose weights these are, in the progress that is shown."""
        self.progress = Progress(label)
        self._threads = ThreadPoolExecutor(num_threads, "weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self.progress.close()

    def start(
        self, stored: StoredTensor, target: torch.Tensor, rows: range, columns: slice | None = None
    ) -> list[Future[None]]:
        """Fill `target` with rows of `stored`, piece by piece."""
        row_bytes = stored.dtype.itemsize * max(1, target[0:1].numel())
        step = max(1, PIECE_BYTES // row_bytes)
        self.progress.expect(len(rows) * row_bytes)
        return [
            self._threads.submit(self._read, stored, target, rows, start, step, columns)
            for start in range(0, len(rows), step)
        ]

    def _read(
        self,
        stored: StoredTensor,
        target: torch.Tensor,
        rows: range,
        start: int,
        step: int,
        columns: slice | None,
    ) -> None:
        piece = rows[start : start + step]
        part = stored.read(slice(piece.start, piece.stop), columns)
        target[start : start + len(piece)].copy_(part)
        self.progress.add(part.numel() * part.element_size())


class Progress:
    """A bar on a terminal, else a line now and then, and one at the end."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self.num_bytes = 0
        self._expected = 0
        self._began = self._told = time.monotonic()
        self._bar = tqdm(
            total=0, unit="B", unit_scale=True, unit_divisor=1024, desc=label, disable=not sys.stderr.isatty()
        )

    def expect(self, num_bytes: int) -> None:
        with self._lock:
            self._expected += num_bytes
            self._bar.total = self._expected

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._bar.update(num_bytes)
            if self._bar.disable and time.monotonic() - self._told > LOG_PERIOD_S:
                self._told = time.monotonic()
                logger.info("%s: %d of %d bytes", self._label, self.num_bytes, self._expected)

    def close(self) -> None:
        self._bar.close()
        seconds = time.monotonic() - self._began
        logger.info("%s: %d bytes in %.2f s", self._label, self.num_bytes, seconds)


def wait(futures: Iterable[Future[None]]) -> None:
    """Raises the first error."""
    for future in futures:
        future.result()
