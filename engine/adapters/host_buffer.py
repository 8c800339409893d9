"""Host memory of any size. Without torch, for processes that read small files only."""

from __future__ import annotations

import mmap
from contextlib import suppress

_MIN_HUGE_BYTES = 4 << 20


def new_buffer(num_bytes: int) -> memoryview:
    """Writable; in huge pages where the kernel has them: first touching 80 MiB then takes half the time."""
    if num_bytes < _MIN_HUGE_BYTES:
        return memoryview(bytearray(num_bytes))
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
