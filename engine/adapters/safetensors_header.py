"""The header of a safetensors file: names, types, shapes and places of its tensors. Trusts nothing in it.

8 bytes: header length N, little-endian | N bytes: JSON | the tensors' bytes, without holes or overlaps
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any, TypeGuard

from engine.adapters.files import WEIGHTS_FILE
from engine.adapters.reader import FileReader
from engine.errors import AdapterRefused

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}

HEAD_BYTES = 1 << 20  # holds the header of 5000 tensors, and the whole file of a small adapter
_MAX_HEADER_BYTES = 4 << 20
_MAX_NAME_CHARS = 512
_MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    dtype: str  # as in ITEM_BYTES
    shape: tuple[int, ...]
    start: int  # offset in the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)}, {self.num_bytes} bytes)"


def read_header(reader: FileReader) -> list[TensorEntry]:
    """The tensors by name. Reads no more of the file than its head. Raises AdapterRefused."""
    size = reader.size(WEIGHTS_FILE)
    head = reader.read_head(WEIGHTS_FILE, HEAD_BYTES)
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES or _LENGTH_BYTES + length > size:
        raise _malformed(f"a header of {length} bytes in a file of {size}: cut off?")
    if _LENGTH_BYTES + length > len(head):
        head = reader.read_head(WEIGHTS_FILE, _LENGTH_BYTES + length)
    return parse_header(head[_LENGTH_BYTES : _LENGTH_BYTES + length], size)


def parse_header(content: bytes, file_bytes: int) -> list[TensorEntry]:
    """`content`: the JSON; `file_bytes`: the size that the whole file has."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _malformed("its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise _malformed("its header holds no JSON object")
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + len(content)
    entries = [_parse_entry(name, fields, data_start) for name, fields in header.items()]
    end = data_start
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            raise _malformed(f"{entry.name} does not follow the tensor before it")
        end = entry.stop
    if end != file_bytes:
        raise _malformed(f"its tensors end at byte {end}, the file at {file_bytes}")
    return sorted(entries, key=lambda e: e.name)


def _parse_entry(name: str, fields: Any, data_start: int) -> TensorEntry:
    # names end in answers and logs
    if len(name) > _MAX_NAME_CHARS or not name.isprintable() or not isinstance(fields, dict):
        raise _malformed(f"the entry of {reprlib.repr(name)}")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise AdapterRefused(f"{name} has the unknown type {reprlib.repr(dtype)}", param=name)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(shape) > _MAX_DIMENSIONS or len(offsets) != 2:
        raise _malformed(f"shape or data_offsets of {name}")
    start, stop = offsets
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise _malformed(f"{name} is {dtype} {shape} but has {stop - start} bytes")
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in value)


def _malformed(reason: str) -> AdapterRefused:
    return AdapterRefused(f"{WEIGHTS_FILE} is malformed: {reason}", param=WEIGHTS_FILE)
