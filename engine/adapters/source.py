"""Where adapters come from: a directory or an S3 prefix. Blocking calls, to be made in threads.

A source holds many adapters, found by name; `describe` and `read_adapter_files` take the URI of one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.adapters import tokenizer_files
from engine.adapters.directory import DirectoryFolder, DirectorySource
from engine.adapters.files import (
    CONFIG_FILE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    AdapterFile,
    AdapterListing,
    FileReader,
    Folder,
    SourceChanged,
)
from engine.adapters.tokenizer_files import TokenizerFiles
from engine.errors import AdapterRefused, InvalidRequest, Unavailable

T = TypeVar("T")

__all__ = [
    "AdapterFile",
    "AdapterFiles",
    "AdapterListing",
    "AdapterSource",
    "describe",
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
    if _is_s3(uri):
        # boto3 takes half a second to import: only those who use S3 pay for it
        from engine.adapters.s3 import S3Source

        return S3Source(uri)
    return DirectorySource(uri)


def describe(uri: str) -> AdapterListing:
    """What is at the URI of one adapter. Raises ModelNotFound if nothing is."""
    return _open_folder(uri).list_files()


def read_adapter_files(listing: AdapterListing, check: Callable[[], None] = lambda: None) -> AdapterFiles:
    """Raises AdapterRefused if files are missing or malformed, SourceChanged if they changed since listed.

    `check` is called during all reads, those of the weights too; what it raises ends them.
    """
    reader = FileReader(_open_folder(listing.uri), listing, check)
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
        return tokenizer_files.read(FileReader(folder, folder.list_files(), lambda: None)).chat_template

    return read_one_version(read)


def read_one_version(read: Callable[[], T]) -> T:
    """`read` lists and reads files; it is called once more if they changed meanwhile."""
    for _ in range(2):
        with suppress(SourceChanged):
            return read()
    raise Unavailable("the adapter's files changed while they were read", retry_after_s=1.0)


def _open_folder(uri: str) -> Folder:
    if _is_s3(uri):
        from engine.adapters.s3 import S3Folder

        return S3Folder(uri)
    return DirectoryFolder(uri)


def _is_s3(uri: str) -> bool:
    """Raises InvalidRequest for any other scheme."""
    if not uri or not uri.isprintable():
        raise InvalidRequest("not the URI of an adapter source", param="uri")
    scheme, separator, _ = uri.partition("://")
    if separator and scheme != "s3":
        raise InvalidRequest(
            f"an adapter source is s3://bucket/prefix or a directory, not {scheme}://", param="uri"
        )
    return bool(separator)
