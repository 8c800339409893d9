"""Host memory for the pages of adapters' images."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, overload

import torch

from engine.adapters.page_file import PageFile


class HostPages(Sequence[torch.Tensor]):
    """An image's pages, each [page_elems], anywhere in an arena: there are no gaps that nothing fits."""

    __slots__ = ("__weakref__", "_follows", "_pages", "numbers")

    def __init__(self, pages: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        """`numbers`: of the pages in their file."""
        self._pages = tuple(pages)
        self._follows = tuple(_follow(*pair) for pair in itertools.pairwise(self._pages))
        self.numbers = tuple(numbers)

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
        return self._follows[index - 1]

    def span(self, first: int, count: int) -> torch.Tensor:
        """Pages that follow each other, as one tensor [count * page_elems]."""
        page = self._pages[first]
        return page.as_strided((count * len(page),), (1,))


class PageSource(Protocol):
    def take(self, num_pages: int) -> HostPages:
        """Their content is arbitrary."""


class HostArena:
    """Pages of one size, in slabs that are never given back: what an image leaves, the next one takes.

    Fresh memory costs page faults, locking it for the GPU's copies costs more, and to free locked memory is
    to wait for the GPU. May be used by several threads, and another process may write the pages (`file`).
    """

    def __init__(self, page_elems: int, dtype: torch.dtype, is_pinned: bool = False) -> None:
        """`is_pinned`: page-locked, so that copies to the GPU run beside everything else."""
        self.page_elems = page_elems
        self.dtype = dtype
        self.file = PageFile(page_elems, dtype)
        self._device = torch.cuda.current_device() if is_pinned else None
        self._lock = threading.Lock()  # between those who take
        # pages come back without the lock, from finalisers, which run wherever they happen to
        self._free: deque[int] = deque()
        self._num_slabs = 0
        self._pinned: list[mmap.mmap] = []
        if is_pinned:
            weakref.finalize(self, _unpin, self._pinned).atexit = False

    @property
    def num_bytes(self) -> int:
        return self._num_slabs * self.file.slab_bytes

    def reserve(self, num_bytes: int) -> threading.Thread:
        """Have slabs ready before a load waits for them, in the thread that is returned."""

        def fill() -> None:
            while self.num_bytes < num_bytes:
                with self._lock:
                    self._free.extend(self._new_slab())

        thread = threading.Thread(target=fill, name="adapter-memory", daemon=True)
        thread.start()
        return thread

    def take(self, num_pages: int) -> HostPages:
        """Their content is arbitrary. They come back when the result is dropped."""
        with self._lock:
            while len(self._free) < num_pages:
                self._free.extend(self._new_slab())
            numbers = [self._free.pop() for _ in range(num_pages)]
        numbers.reverse()  # as they lie in a fresh slab
        pages = HostPages([self.file.page(number) for number in numbers], numbers)
        weakref.finalize(pages, self._put_back, numbers).atexit = False
        return pages

    def _put_back(self, numbers: list[int]) -> None:
        """Bound to this arena: it lives as long as any image in it."""
        self._free.extend(numbers)

    def _new_slab(self) -> range:
        index = self._num_slabs
        self.file.grow(index + 1)
        slab = self.file.slab(index)  # here, where nothing is lost if it cannot be mapped
        if self._device is not None:
            # a thread begins on the first GPU, this rank may have another
            with torch.cuda.device(self._device):
                _pin(slab)
            self._pinned.append(slab)
        self._num_slabs += 1
        return range(index * self.file.pages_per_slab, (index + 1) * self.file.pages_per_slab)


def _follow(before: torch.Tensor, page: torch.Tensor) -> bool:
    is_next = page.data_ptr() == before.data_ptr() + before.nbytes
    return is_next and page.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()


def _pin(slab: mmap.mmap) -> None:
    """A step must not wait for it: the GIL is free all the time."""
    address = _address(slab)
    # faults first: the driver would take them one by one, with launches of other threads waiting for it
    ctypes.memset(address, 0, len(slab))
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(address, len(slab), 0))


def _unpin(slabs: list[mmap.mmap]) -> None:
    """Before they are freed: else others who get their addresses could not pin them."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for slab in slabs:
        torch.cuda.check_error(cudart.cudaHostUnregister(_address(slab)))


def _address(slab: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slab))
