"""Pages of host memory that processes share: a file without a name, mapped slab by slab as needed."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from contextlib import suppress

import torch

SLAB_BYTES = 64 << 20
_ALIGNMENT = 2 << 20  # of slabs: a huge page
_MANY_FDS = 1 << 16


def raise_fd_limit() -> None:
    """Python's mmap keeps a descriptor for each slab: 64 GiB take as many as a process often has at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FDS if hard == resource.RLIM_INFINITY else min(hard, _MANY_FDS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class PageFile:
    """Pages of one size, by number. It only grows: what is mapped stays. May be used by several threads."""

    def __init__(self, page_elems: int, dtype: torch.dtype, fd: int | None = None) -> None:
        """`fd`: of another process's file of such pages, which is closed with this; None: a new one."""
        self._page_elems = page_elems
        self._dtype = dtype
        self._page_bytes = page_elems * dtype.itemsize
        self.pages_per_slab = max(1, SLAB_BYTES // self._page_bytes)
        self.slab_bytes = -(-self.pages_per_slab * self._page_bytes // _ALIGNMENT) * _ALIGNMENT
        self.fd = os.memfd_create("adapter-pages") if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        self._lock = threading.Lock()  # over what follows
        self._slabs: dict[int, mmap.mmap] = {}
        self._pages: dict[int, torch.Tensor] = {}

    def grow(self, num_slabs: int) -> None:
        """To so many slabs of zeros; memory is taken where they are touched."""
        os.ftruncate(self.fd, num_slabs * self.slab_bytes)

    def slab(self, index: int) -> mmap.mmap:
        with self._lock:
            return self._slab(index)

    def page(self, number: int) -> torch.Tensor:
        """[page_elems]"""
        with self._lock:
            if number not in self._pages:
                self._slab(number // self.pages_per_slab)
            return self._pages[number]

    def _slab(self, index: int) -> mmap.mmap:
        if index not in self._slabs:
            slab = mmap.mmap(self.fd, self.slab_bytes, mmap.MAP_SHARED, offset=index * self.slab_bytes)
            with suppress(OSError):  # if the kernel has huge pages for such files
                slab.madvise(mmap.MADV_HUGEPAGE)
            self._slabs[index] = slab
            num_elems = self.pages_per_slab * self._page_elems
            elements = torch.frombuffer(slab, dtype=self._dtype, count=num_elems)
            pages = elements.view(self.pages_per_slab, self._page_elems).unbind()
            self._pages.update(enumerate(pages, index * self.pages_per_slab))
        return self._slabs[index]
