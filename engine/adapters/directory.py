"""Adapters in a local directory. Nothing outside it is read, whatever names and symbolic links say."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from engine.adapters.files import (
    CONFIG_FILE,
    FILE_NAMES,
    AdapterFile,
    AdapterListing,
    SourceChanged,
    make_listing,
    read_open_file,
)
from engine.adapters.names import check_adapter_name, is_folder_name
from engine.errors import AccessDenied, InvalidRequest, ModelNotFound, Unavailable


class DirectorySource:
    """Each sub-directory that holds an adapter_config.json is an adapter."""

    def __init__(self, root: str) -> None:
        self._root = Path(os.path.realpath(root))
        if not self._root.is_dir():
            raise InvalidRequest(f"adapter source {root} is not a directory", param="adapter_source")

    def list_adapters(self) -> list[AdapterListing]:
        try:
            with os.scandir(self._root) as entries:
                found = sorted((e.name, e.is_symlink()) for e in entries if is_folder_name(e.name))
        except OSError as error:
            raise Unavailable(
                f"the adapter source cannot be listed ({type(error).__name__})", retry_after_s=1.0
            ) from error
        listings = []
        for name, is_link in found:
            # one unreadable directory must not hide the others
            with contextlib.suppress(ModelNotFound, AccessDenied):
                # links alone are resolved: that takes most of the time, and there may be thousands of names
                listings.append(self.find(name) if is_link else _list_files(self._root / name, name))
        return listings

    def find(self, name: str) -> AdapterListing:
        check_adapter_name(name, param="model")
        if not is_folder_name(name):
            raise ModelNotFound(f"no adapter {name!r}")
        path = Path(os.path.realpath(self._root / name))
        if not path.is_relative_to(self._root):  # a link that leads out of it
            raise ModelNotFound(f"no adapter {name!r}")
        return DirectoryFolder(path, name).list_files()


class DirectoryFolder:
    parallel_reads = 1

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        self._path = Path(os.path.realpath(path))
        self._name = name or Path(os.path.abspath(path)).name

    def list_files(self) -> AdapterListing:
        return _list_files(self._path, self._name)

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        try:
            # not blocking: the file may have been replaced by a pipe that nobody writes to
            fd = os.open(_resolve(self._path, file.name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError as error:
            raise _denied(self._name) from error
        except OSError as error:
            raise SourceChanged from error
        try:
            self._fill(fd, file, offset, view, check)
        except OSError as error:
            raise Unavailable(f"adapter {self._name!r}: {file.name} cannot be read") from error
        finally:
            os.close(fd)

    def _fill(
        self, fd: int, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]
    ) -> None:
        if _as_file(file.name, os.fstat(fd)) != file:
            raise SourceChanged
        read_open_file(fd, offset, view, check)
        # once more: a write in mid-read must be seen
        if _as_file(file.name, os.fstat(fd)) != file:
            raise SourceChanged


def _list_files(folder: Path, name: str) -> AdapterListing:
    """`folder`: with no link in its path."""
    try:
        with os.scandir(folder) as entries:
            found = [_stat(folder, entry) for entry in entries if entry.name in FILE_NAMES]
    except PermissionError as error:
        raise _denied(name) from error
    except OSError:  # absent, or no directory
        found = []
    files = [file for file in found if file is not None]
    if all(file.name != CONFIG_FILE for file in files):
        raise ModelNotFound(f"no adapter {name!r}: there is no {CONFIG_FILE}")
    return make_listing(name, str(folder), files)


def _stat(folder: Path, entry: os.DirEntry[str]) -> AdapterFile | None:
    """None for what is no regular file or lies elsewhere."""
    try:
        path = _resolve(folder, entry.name) if entry.is_symlink() else entry.path
        status = os.stat(path, follow_symlinks=False)
    except PermissionError:
        raise
    except OSError:
        return None
    return _as_file(entry.name, status)


def _resolve(folder: Path, name: str) -> Path:
    """Raises FileNotFoundError if a link leads out of the adapter's directory."""
    path = Path(os.path.realpath(folder / name))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        # Hugging Face's cache: snapshots/<revision>/<file> links to blobs/<hash>
        allowed.append(folder.parent.parent / "blobs")
    if not any(path.is_relative_to(root) for root in allowed):
        raise FileNotFoundError(name)
    return path


def _denied(name: str) -> AccessDenied:
    return AccessDenied(f"adapter {name!r}: its source denies access")


def _as_file(name: str, status: os.stat_result) -> AdapterFile | None:
    if not stat.S_ISREG(status.st_mode):
        return None
    return AdapterFile(name, status.st_size, str(status.st_mtime_ns))
