"""Frames between rank 0 and the others: a kind, a length, a payload. JSON, or a plan's numbers; no pickle.

rank -> rank 0   HELLO [token, rank], from one that connects
rank 0 -> rank   CONFIG [config, rank, rendezvous], then, done in the order of their arrival,
                 START [request, params, seed, prompt], FINISH [request], STEP plan,
                 LOAD [number, uri, version], DROP [number]
rank -> rank 0   READY facts or FAILED error once, then LOADED [number, digest or null, error or null]
"""

from __future__ import annotations

import json
import socket
import struct
from enum import IntEnum
from typing import Any

from engine.wire import read_exactly

_HEADER = struct.Struct("!BI")


class Kind(IntEnum):
    CONFIG = 0
    READY = 1
    FAILED = 2
    START = 3
    FINISH = 4
    STEP = 5
    LOAD = 6
    LOADED = 7
    DROP = 8
    HELLO = 9


def encode(kind: Kind, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


def encode_json(kind: Kind, message: Any) -> bytes:
    return encode(kind, json.dumps(message, separators=(",", ":")).encode())


def read(
    sock: socket.socket, max_bytes: int | None = None, deadline: float | None = None
) -> tuple[Kind, bytes]:
    """Blocks. Raises EOFError when the other side is gone, ValueError for what is none of ours.

    With a deadline: raises OSError then, and leaves the socket with some timeout.
    """
    kind, length = _HEADER.unpack(read_exactly(sock, _HEADER.size, deadline))
    if max_bytes is not None and length > max_bytes:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(kind), read_exactly(sock, length, deadline)
