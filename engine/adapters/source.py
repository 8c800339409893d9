"""Where adapters come from: a directory or an S3 prefix. Blocking calls, to be made in threads.

A source holds many adapters, found by name; `describe` and `read_adapter_files` take the URI of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.adapters import tokenizer_files
from engine.adapters.directory import DirectoryFolder, DirectorySource
from engine.adapters.files import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    PICKLE_FILE,
    SUMS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterFile,
    AdapterListing,
    Folder,
    SourceChanged,
)
from engine.adapters.reader import MAX_SMALL_FILE_BYTES, FileReader
from engine.adapters.safetensors_header import HEAD_BYTES
from engine.adapters.tokenizer_files import TokenizerFiles
from engine.errors import AdapterRefused, InvalidRequest, Unavailable

T = TypeVar("T")

# all that most adapters are decided by: asked for at once, so that one answer is waited for instead of five
_FIRST_READS = {
    CONFIG_FILE: MAX_SMALL_FILE_BYTES,
    SUMS_FILE: MAX_SMALL_FILE_BYTES,
    TEMPLATE_FILE: MAX_SMALL_FILE_BYTES,
    TOKENIZER_CONFIG_FILE: MAX_SMALL_FILE_BYTES,
    ADDED_TOKENS_FILE: MAX_SMALL_FILE_BYTES,
    WEIGHTS_FILE: HEAD_BYTES,
}

__all__ = [
    "AdapterFile",
    "AdapterFiles",
    "AdapterListing",
    "AdapterSource",
    "describe",
    "is_s3",
    "open_reader",
    "open_source",
    "read_adapter_files",
    "read_chat_template",
    "read_one_version",
]


class AdapterSource(Protocol):
    def list_adapters(self) -> list[AdapterListing]:
        """All of them, by name."""

    def find(self, name: str) -> AdapterListing:
        """Raises InvalidRequest if that is no name for an adapter, ModelNotFound if none has it."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """One adapter's small files, and a reader for its weights."""

    config: bytes
    tokenizer: TokenizerFiles
    reader: FileReader


def open_source(uri: str) -> AdapterSource:
    if is_s3(uri):
        # boto3 takes half a second to import: only those who use S3 pay for it
        from engine.adapters.s3 import S3Source

        return S3Source(uri)
    return DirectorySource(uri)


def describe(uri: str) -> AdapterListing:
    """What is at the URI of one adapter. Raises ModelNotFound if nothing is."""
    return _open_folder(uri).list_files()


def open_reader(listing: AdapterListing, check: Callable[[], None] = lambda: None) -> FileReader:
    """`check` is called during all reads; what it raises ends them."""
    return FileReader(_open_folder(listing.uri), listing, check)


def read_adapter_files(reader: FileReader) -> AdapterFiles:
    """Raises AdapterRefused if files are missing or malformed, SourceChanged if they changed since listed."""
    listing = reader.listing
    reader.prefetch(_FIRST_READS)
    config = reader.read_small(CONFIG_FILE)
    if listing.find(WEIGHTS_FILE) is None:
        if listing.find(PICKLE_FILE) is not None:
            raise AdapterRefused(
                f"{PICKLE_FILE} is a pickle, which can run code when it is read; "
                f"save the adapter as {WEIGHTS_FILE}",
                param=PICKLE_FILE,
            )
        raise AdapterRefused(f"there is no {WEIGHTS_FILE}", param=WEIGHTS_FILE)
    assert config is not None  # a folder without it is no adapter
    return AdapterFiles(config, tokenizer_files.read(reader), reader)


def read_chat_template(uri: str) -> str | None:
    """The adapter's own template; None: the base model's is used. Reads small files only."""
    folder = _open_folder(uri)

    def read() -> str | None:
        return tokenizer_files.read(FileReader(folder, folder.list_files())).chat_template

    return read_one_version(read)


def read_one_version(read: Callable[[], T]) -> T:
    """`read` lists and reads files; it is called once more if they changed meanwhile."""
    try:
        return read()
    except SourceChanged:
        pass
    try:
        return read()
    except SourceChanged as changed:
        error = changed.error
    raise error or Unavailable("the adapter's files changed while they were read", retry_after_s=1.0)


def _open_folder(uri: str) -> Folder:
    if is_s3(uri):
        from engine.adapters.s3 import S3Folder

        return S3Folder(uri)
    return DirectoryFolder(uri)


def is_s3(uri: str) -> bool:
    """Raises InvalidRequest for any other scheme."""
    if not uri or not uri.isprintable():
        raise InvalidRequest("not the URI of an adapter source", param="uri")
    scheme, separator, _ = uri.partition("://")
    if separator and scheme != "s3":
        raise InvalidRequest(
            f"an adapter source is s3://bucket/prefix or a directory, not {scheme}://", param="uri"
        )
    return bool(separator)
