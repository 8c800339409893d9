"""Host memory for the pages of adapters' images."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import torch

from engine.adapters.host_buffer import new_buffer

_SLAB_BYTES = 64 << 20


class HostPages(Sequence[torch.Tensor]):
    """An image's pages, each [page_elems], anywhere in an arena: there are no gaps that nothing fits."""

    __slots__ = ("__weakref__", "_pages")

    def __init__(self, pages: Sequence[torch.Tensor]) -> None:
        self._pages = tuple(pages)

    def __len__(self) -> int:
        return len(self._pages)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Tensor, ...]: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self._pages[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._pages)

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self._pages)

    def follows(self, index: int) -> bool:
        """Whether this page begins where the one before it ends."""
        before, page = self._pages[index - 1 : index + 1]
        is_next = page.data_ptr() == before.data_ptr() + before.nbytes
        return is_next and page.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()

    def span(self, first: int, count: int) -> torch.Tensor:
        """Pages that follow each other, as one tensor [count * page_elems]."""
        page = self._pages[first]
        return page.as_strided((count * len(page),), (1,))


class HostArena:
    """Pages of one size, in slabs that are never given back: what an image leaves, the next one takes.

    Fresh memory costs page faults, locking it for the GPU's copies costs more, and to free locked memory is
    to wait for the GPU. May be used by several threads.
    """

    def __init__(self, page_elems: int, dtype: torch.dtype, is_pinned: bool = False) -> None:
        """`is_pinned`: page-locked, so that copies to the GPU run beside everything else."""
        self._page_elems = page_elems
        self._dtype = dtype
        self._is_pinned = is_pinned
        self._lock = threading.Lock()  # between those who take
        # pages come back without the lock, from finalisers, which run wherever they happen to
        self._free: deque[torch.Tensor] = deque()
        self._slabs: list[memoryview] = []
        if is_pinned:
            weakref.finalize(self, _unpin, self._slabs).atexit = False

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, num_pages: int) -> HostPages:
        """Their content is arbitrary. They come back when the result is dropped."""
        with self._lock:
            while len(self._free) < num_pages:
                self._free.extend(self._new_slab())
            taken = [self._free.pop() for _ in range(num_pages)]
        taken.reverse()  # as they lie in a fresh slab
        pages = HostPages(taken)
        weakref.finalize(pages, self._put_back, taken).atexit = False
        return pages

    def _put_back(self, pages: list[torch.Tensor]) -> None:
        """Bound to this arena: it lives as long as any image in it."""
        self._free.extend(pages)

    def _new_slab(self) -> tuple[torch.Tensor, ...]:
        page_bytes = self._page_elems * self._dtype.itemsize
        num_pages = max(1, _SLAB_BYTES // page_bytes)
        buffer = new_buffer(num_pages * page_bytes)
        if self._is_pinned:
            _pin(buffer)
        self._slabs.append(buffer)
        return torch.frombuffer(buffer, dtype=self._dtype).view(num_pages, self._page_elems).unbind()


def _pin(buffer: memoryview) -> None:
    memory = np.frombuffer(buffer, np.uint8)
    # faults first: the driver would take them one by one, with launches of other threads waiting for it
    memory[:: mmap.PAGESIZE] = 0
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))


def _unpin(buffers: list[memoryview]) -> None:
    """Before they are freed: else others who get their addresses could not pin them."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for buffer in buffers:
        torch.cuda.check_error(cudart.cudaHostUnregister(np.frombuffer(buffer, np.uint8).ctypes.data))
