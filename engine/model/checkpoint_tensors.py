"""The tensors of a checkpoint, by name, of which parts are read: from local files or from S3.

A local file is mapped, so that of a part only its own bytes are copied. From S3 whole rows are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from engine.adapters.safetensors_header import HEAD_BYTES, TensorEntry, parse_header
from engine.dtypes import STORED
from engine.errors import AdapterRefused, InvalidRequest
from engine.model.remote import RemoteFile, list_weights
from engine.model.spec import ModelSpec

_LENGTH_BYTES = 8


class StoredTensor(Protocol):
    """Several threads may read it at once."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, rows: slice, columns: slice | None = None) -> torch.Tensor:
        """A part, as it is stored. `columns`: None for all, as of a vector."""


@contextmanager
def open_tensors(spec: ModelSpec) -> Iterator[Mapping[str, StoredTensor]]:
    """Raises InvalidRequest for files that are missing or malformed, and what S3 makes go wrong."""
    if spec.remote_uri is not None:
        yield _open_remote(spec.path, spec.remote_uri)
        return
    with ExitStack() as files:
        yield _open_local(Path(spec.path), files)


class _LocalTensor:
    def __init__(self, stored: Any) -> None:
        """`stored`: safetensors' slice."""
        self.shape: tuple[int, ...] = tuple(stored.get_shape())
        self.dtype = _dtype(stored.get_dtype())
        self._stored = stored

    def read(self, rows: slice, columns: slice | None = None) -> torch.Tensor:
        # a view of the mapped file: the pages are read when it is copied
        part: torch.Tensor = self._stored[rows if columns is None else (rows, columns)]
        return part


class _RemoteTensor:
    def __init__(self, file: RemoteFile, entry: TensorEntry) -> None:
        self.shape = entry.shape
        self.dtype = _dtype(entry.dtype)
        self._file = file
        self._entry = entry

    def read(self, rows: slice, columns: slice | None = None) -> torch.Tensor:
        start, stop, _ = rows.indices(self.shape[0])
        row_bytes = self._entry.num_bytes // self.shape[0]
        begin = self._entry.start
        content = self._file.read(begin + start * row_bytes, begin + stop * row_bytes)
        part = torch.frombuffer(content, dtype=self.dtype).view(stop - start, *self.shape[1:])
        return part if columns is None else part[:, columns]


def _open_local(directory: Path, opened: ExitStack) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name in _file_names(directory):
        if not (directory / name).is_file():
            raise _missing(str(directory / name))
        file = opened.enter_context(safe_open(directory / name, framework="pt"))
        tensors.update((key, _LocalTensor(file.get_slice(key))) for key in file.keys())  # noqa: SIM118  not a dict
    return tensors


def _open_remote(directory: str, uri: str) -> dict[str, StoredTensor]:
    files = {file.name: file for file in list_weights(uri)}
    tensors: dict[str, StoredTensor] = {}
    for name in _file_names(Path(directory)):
        if name not in files:
            raise _missing(f"{uri}/{name}")
        file = files[name]
        tensors.update((entry.name, _RemoteTensor(file, entry)) for entry in _read_header(file))
    return tensors


def _read_header(file: RemoteFile) -> list[TensorEntry]:
    head = file.read(0, min(HEAD_BYTES, file.size))
    stop = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
    if stop > file.size:
        raise InvalidRequest(f"{file.name} is cut off", param="model")
    if stop > len(head):
        head += file.read(len(head), stop)
    try:
        return parse_header(bytes(head[_LENGTH_BYTES:stop]), file.size)
    except AdapterRefused as error:  # which names an adapter's file
        raise InvalidRequest(f"{file.name} is no safetensors file", param="model") from error


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))


def _missing(file: str) -> InvalidRequest:
    return InvalidRequest(f"{file} is missing; only safetensors are read", param="model")


def _dtype(name: str) -> torch.dtype:
    if name not in STORED:
        raise InvalidRequest(
            f"the checkpoint's weights are {name}; supported: {', '.join(STORED)}", param="model"
        )
    return STORED[name]
