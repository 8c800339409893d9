"""One load from its URI to a packed image, start to end. Blocking; shares nothing with other loads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.adapters.checkpoint import load_checkpoint
from engine.adapters.image import AdapterImage, pack
from engine.adapters.source import SourceChanged, describe, read_adapter_files
from engine.errors import Unavailable
from engine.shape import ModelShape

_MAX_READS = 2


def load_image(
    uri: str,
    shape: ModelShape,
    page_elems: int,
    dtype: torch.dtype,
    max_rank: int,
    *,
    pin_memory: bool = False,
    check: Callable[[], None] = lambda: None,
) -> AdapterImage:
    """Raises LorafleetErrors. `check` is called between reads; what it raises ends the load."""
    for _ in range(_MAX_READS):
        try:
            files = read_adapter_files(describe(uri), check)
            checkpoint = load_checkpoint(files, shape, max_rank)
        except SourceChanged:
            continue  # files of two versions must never be mixed
        check()
        return pack(checkpoint, shape, page_elems, dtype, pin_memory)
    raise Unavailable("the adapter's files changed while they were read", retry_after_s=1.0)
