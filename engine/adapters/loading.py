"""One load from its URI to a packed image, start to end. Blocking; shares nothing with other loads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from engine.adapters.checkpoint import start_checkpoint
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.files import SourceChanged
from engine.adapters.image import AdapterImage, ImageFormat, pack
from engine.adapters.reader import FileReader
from engine.adapters.source import describe, is_s3, open_reader, read_adapter_files, read_one_version
from engine.errors import AdapterRefused


def load_image(
    uri: str,
    form: ImageFormat,
    check: Callable[[], None] = lambda: None,
    version: str | None = None,
    disk: DiskWriter | None = None,
) -> AdapterImage:
    """From disk if just that version was kept there, else what is at the source now.

    Raises LorafleetErrors. `check` is called between reads; what it raises ends the load.
    """
    is_remote = is_s3(uri)
    if disk and version and is_remote:
        image = _read_from_disk(uri, version, form, check, disk)
        if image is not None:
            return replace(image, is_from_disk=True)

    def read() -> AdapterImage:
        reader = open_reader(describe(uri), check)
        try:
            image = _read_image(reader, form)
        except AdapterRefused as error:
            if not is_remote:
                raise
            raise SourceChanged(error) from None  # once more: bytes may have been damaged on their way
        if disk and is_remote:
            disk.offer(reader)
        return image

    return read_one_version(read)


def _read_from_disk(
    uri: str, version: str, form: ImageFormat, check: Callable[[], None], disk: DiskWriter
) -> AdapterImage | None:
    """None if it is not there, or if anything is wrong with it: then the source decides."""
    with suppress(OSError):
        folder = disk.cache.open(uri, version)
        if folder is None:
            return None
        with folder, suppress(SourceChanged, AdapterRefused):
            return _read_image(FileReader(folder, folder.listing, check, folder.digests), form)
        disk.cache.discard(uri, version)
    return None


def _read_image(reader: FileReader, form: ImageFormat) -> AdapterImage:
    files = read_adapter_files(reader)
    with start_checkpoint(files, form.shape, form.max_rank, form.check_size) as checkpoint:
        return pack(checkpoint, form)
