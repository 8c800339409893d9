"""Adapters on their way from host memory into the pool, on a stream of their own, beside the steps.

Layers go in order, and the layers of a step wait for their part of the weights only; the host never waits.
Nothing that a step needs goes by a copy of its own: it would wait for all of these (kernels.host_read).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.adapters.host_memory import HostPages
from engine.adapters.image import AdapterImage
from engine.plan import AdapterLoad
from engine.runner.uploads import Uploads
from kernels.sgmv import AdapterTable, absolute_offsets

NUM_PARTS = 4  # of a copy, each with an event of its own


@dataclass(frozen=True, slots=True)
class _Copy:
    slot: int
    image: AdapterImage  # its memory must stay until the copy is done, also if the adapter is gone by then
    done: list[torch.cuda.Event]  # of each part
    parts: list[int]  # of each layer: the last part that it needs


class AdapterCopies:
    def __init__(self, pool: torch.Tensor, table: AdapterTable) -> None:
        """`pool` [pages, page elements]. Rows of `table` are written on the stream of the steps."""
        self.ranks = np.zeros(len(table.ranks), np.int32)  # of each slot, the largest of its modules
        self._pool = pool
        self._table = table
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._uploads = Uploads(pool.device)
        self._in_flight: deque[_Copy] = deque()  # in the order in which they end
        self._by_slot: dict[int, _Copy] = {}

    def evict(self, slot: int) -> None:
        self.wait([slot])  # its pages are about to be others'
        self._by_slot.pop(slot, None)
        self._table.clear(slot)

    def start(self, load: AdapterLoad, image: AdapterImage, last_step: torch.cuda.Event) -> None:
        """`last_step`: the end of the step in flight."""
        if load.after_steps:
            self._stream.wait_event(last_step)
        pages_each = -(-image.num_pages // NUM_PARTS)
        with torch.cuda.stream(self._stream):
            done = [
                self._copy_pages(image.pages, load.page_ids, first, min(first + pages_each, image.num_pages))
                for first in range(0, image.num_pages, pages_each)
            ]
        parts = [page // pages_each for page in _last_pages(image)]
        self._by_slot[load.slot] = _Copy(load.slot, image, done, parts)
        self._in_flight.append(self._by_slot[load.slot])
        offsets = absolute_offsets(image.tile_offsets, load.page_ids, self._pool.shape[1])
        self._table.put(load.slot, *self._uploads.put(offsets, image.ranks, image.scales))
        self.ranks[load.slot] = image.rank

    def wait(self, slots: Iterable[int]) -> None:
        """The steps' stream waits until these adapters are there."""
        for copy in self._unfinished(slots):
            torch.cuda.current_stream().wait_event(copy.done[-1])

    def wait_for_layer(self, layer: int, slots: Iterable[int]) -> None:
        """The same for the weights of one layer."""
        for copy in self._unfinished(slots):
            torch.cuda.current_stream().wait_event(copy.done[copy.parts[layer]])

    def _unfinished(self, slots: Iterable[int]) -> list[_Copy]:
        while self._in_flight and self._in_flight[0].done[-1].query():  # type: ignore[no-untyped-call]
            copy = self._in_flight.popleft()
            if self._by_slot.get(copy.slot) is copy:
                del self._by_slot[copy.slot]
        return [self._by_slot[slot] for slot in slots if slot in self._by_slot]

    def _copy_pages(
        self, pages: HostPages, page_ids: tuple[int, ...], start: int, stop: int
    ) -> torch.cuda.Event:
        page_elems = self._pool.shape[1]
        pool = self._pool.view(-1)
        for first, count in _runs(pages, page_ids, start, stop):
            begin = page_ids[first] * page_elems
            target = pool[begin : begin + count * page_elems]
            target.copy_(pages.span(first, count), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done


def _runs(pages: HostPages, page_ids: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(first, count) of pages that follow each other in both memories. A copy takes 10 us of the host."""
    first = start
    for i in range(start + 1, stop + 1):
        if i == stop or page_ids[i] != page_ids[i - 1] + 1 or not pages.follows(i):
            yield first, i - first
            first = i


def _last_pages(image: AdapterImage) -> list[int]:
    """Of each layer: the last page that it or a layer before has a tile in."""
    # numpy: PyTorch calls all its threads together for that, which takes them milliseconds on a busy machine
    offsets = image.tile_offsets.numpy()
    last_tiles = np.maximum.accumulate(offsets.reshape(len(offsets), -1).max(axis=1))
    # a layer without tiles needs what the one before needs, the first one nothing
    pages: list[int] = (last_tiles.clip(min=0) // len(image.pages[0])).tolist()
    return pages


def measure_copies(pool: torch.Tensor, num_pages: int = 16) -> float:
    """Bytes a second from pinned memory into the pool; overwrites its first page."""
    source = torch.zeros(num_pages, pool.shape[1], dtype=pool.dtype, pin_memory=True)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for page in source:
            pool[0].copy_(page, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return source.nbytes / min(seconds)
