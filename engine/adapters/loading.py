"""One load from its URI to a packed image, start to end. Blocking; shares nothing with other loads."""

from __future__ import annotations

from collections.abc import Callable

from engine.adapters.checkpoint import start_checkpoint
from engine.adapters.image import AdapterImage, ImageFormat, pack
from engine.adapters.reader import FileReader
from engine.adapters.source import describe, open_reader, read_adapter_files, read_one_version


def load_image(uri: str, form: ImageFormat, check: Callable[[], None] = lambda: None) -> AdapterImage:
    """Raises LorafleetErrors. `check` is called between reads; what it raises ends the load."""
    return read_one_version(lambda: read_image(open_reader(describe(uri), check), form))


def read_image(reader: FileReader, form: ImageFormat) -> AdapterImage:
    """Raises SourceChanged as well: the files changed, or are not the right ones."""
    files = read_adapter_files(reader)
    with start_checkpoint(files, form.shape, form.max_rank, form.check_size) as checkpoint:
        return pack(checkpoint, form)
