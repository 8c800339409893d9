"""One load from its URI to a packed image, start to end. Blocking; shares nothing with other loads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.adapters.checkpoint import AdapterCheckpoint, load_checkpoint
from engine.adapters.image import AdapterImage, pack
from engine.adapters.source import describe, read_adapter_files, read_one_version
from engine.shape import ModelShape


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

    def read() -> AdapterCheckpoint:
        return load_checkpoint(read_adapter_files(describe(uri), check), shape, max_rank)

    return pack(read_one_version(read), shape, page_elems, dtype, pin_memory)
