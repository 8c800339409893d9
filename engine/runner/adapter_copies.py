"""Adapters on their way from host memory into the pool, on a stream of their own, beside the steps.

A copy is one transfer a page: longer ones would keep a step's inputs waiting, which take the same way. Layers
go in order, and the layers of a step wait for their part of the weights only; the host never waits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from engine.adapters.image import AdapterImage
from engine.plan import AdapterLoad
from engine.sampler import to_device
from kernels.sgmv import AdapterTable, absolute_offsets

NUM_GROUPS = 4  # of layers, each with an event of its own


@dataclass(frozen=True, slots=True)
class _Copy:
    image: AdapterImage  # its memory must stay until the copy is done
    done: list[torch.cuda.Event]  # of each group


class AdapterCopies:
    def __init__(self, pool: torch.Tensor, table: AdapterTable) -> None:
        """`pool` [pages, page elements]. Rows of `table` are written on the stream of the steps."""
        self.ranks = np.zeros(len(table.ranks), np.int32)  # of each slot, the largest of its modules
        self._pool = pool
        self._table = table
        num_layers = table.ranks.shape[1]
        self._first_layers = [group * num_layers // NUM_GROUPS for group in range(NUM_GROUPS)]
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._in_flight: dict[int, _Copy] = {}  # by slot

    def evict(self, slot: int) -> None:
        self.wait([slot])  # its pages are about to be others'
        self._in_flight.pop(slot, None)
        self._table.clear(slot)

    def start(self, load: AdapterLoad, image: AdapterImage, last_step: torch.cuda.Event) -> None:
        """`last_step`: the end of the step in flight."""
        if load.after_steps:
            self._stream.wait_event(last_step)
        with torch.cuda.stream(self._stream):
            done = self._copy_pages(image, load.page_ids)
        self._in_flight[load.slot] = _Copy(image, done)
        offsets = absolute_offsets(image.tile_offsets, load.page_ids, self._pool.shape[1])
        device = self._pool.device
        row = (to_device(tensor, device) for tensor in (offsets, image.ranks, image.scales))
        self._table.put(load.slot, *row)
        self.ranks[load.slot] = image.rank

    def wait(self, slots: Iterable[int]) -> None:
        """The steps' stream waits until these adapters are there."""
        for copy in self._unfinished(slots):
            torch.cuda.current_stream().wait_event(copy.done[-1])

    def wait_for_layer(self, layer: int, slots: Iterable[int]) -> None:
        """The same for what a layer needs, if the layers before have been waited for."""
        if layer in self._first_layers:
            group = self._first_layers.index(layer)
            for copy in self._unfinished(slots):
                torch.cuda.current_stream().wait_event(copy.done[group])

    def _unfinished(self, slots: Iterable[int]) -> list[_Copy]:
        if not self._in_flight:
            return []
        self._in_flight = {s: copy for s, copy in self._in_flight.items() if not copy.done[-1].query()}
        return [self._in_flight[slot] for slot in slots if slot in self._in_flight]

    def _copy_pages(self, image: AdapterImage, page_ids: tuple[int, ...]) -> list[torch.cuda.Event]:
        done: list[torch.cuda.Event] = []
        for first, last in itertools.pairwise([0, *self._page_ends(image)]):
            for index in range(first, last):
                self._pool[page_ids[index]].copy_(image.pages[index], non_blocking=True)
            done.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            done[-1].record()
        return done

    def _page_ends(self, image: AdapterImage) -> list[int]:
        """One past the last page that the layers up to the end of each group have tiles in."""
        num_layers = len(image.tile_offsets)
        last_tile = image.tile_offsets.view(num_layers, -1).max(dim=1).values
        last_tile = last_tile.cummax(dim=0).values  # layers without an adapter have no tile
        ends = [last_tile[layer - 1] // image.pages.shape[1] + 1 for layer in self._first_layers[1:]]
        return [*map(int, ends), image.num_pages]


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
