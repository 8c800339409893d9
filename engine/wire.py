"""Frames between an engine process and its client: a length, then JSON. Nothing is ever unpickled.

client -> engine   [call, ...]         add, abort, load, prefetch, unload, pin, unpin; the end stops it
engine -> client   {"ready": facts} or {"failed": error} once, then {"events": [...]}, {"stats": {...}}, and
                   {"beat": seconds since the loop's last turn} where nothing else was sent for a second
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

from engine.errors import LorafleetError
from engine.events import CallEvent, Event, TokenEvent
from engine.request import AdapterRef, GenerateRequest, Milestones, TokenLogprob
from engine.sampling_params import SamplingParams

HEADER = struct.Struct("!I")
_MOST_AT_ONCE = 1 << 20  # bytes


def encode_frame(message: Any) -> bytes:
    payload = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(len(payload)) + payload


def read_frame(sock: socket.socket) -> Any:
    """Blocks. Raises EOFError when the other side is gone."""
    (length,) = HEADER.unpack(read_exactly(sock, HEADER.size))
    return json.loads(read_exactly(sock, length))


def encode_ref(ref: AdapterRef) -> dict[str, str]:
    return asdict(ref)


def decode_ref(data: dict[str, str]) -> AdapterRef:
    return AdapterRef(**data)


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": request.prompt_token_ids,
        "params": request.params.to_dict(),
        "adapter": encode_ref(request.adapter) if request.adapter else None,
        "timeout_s": request.timeout_s,
        "is_traced": request.is_traced,
    }


def decode_request(data: dict[str, Any]) -> GenerateRequest:
    """Raises InvalidRequest, as SamplingParams does."""
    return GenerateRequest(
        request_id=data["request_id"],
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        params=SamplingParams.from_dict(data["params"]),
        adapter=decode_ref(data["adapter"]) if data["adapter"] else None,
        timeout_s=data["timeout_s"],
        is_traced=data["is_traced"],
    )


def encode_choices(requests: Sequence[GenerateRequest]) -> list[Any]:
    """Of one request: they differ in their ids and seeds only, and the prompt may be long."""
    return [encode_request(requests[0]), [[request.request_id, request.params.seed] for request in requests]]


def decode_choices(data: dict[str, Any], choices: list[list[Any]]) -> list[GenerateRequest]:
    request = decode_request(data)
    return [
        replace(request, request_id=request_id, params=replace(request.params, seed=seed))
        for request_id, seed in choices
    ]


def encode_event(event: Event) -> list[Any]:
    # positional: half the bytes and half the time of objects
    error = event.error.to_dict() if event.error else None
    if isinstance(event, CallEvent):
        return ["call", event.call_id, event.result, error]
    return [
        "token", event.request_id, event.token_id, encode_logprob(event.logprob),
        event.finish_reason, event.stop_token_id, error, event.num_cached_tokens,
        *encode_milestones(event.milestones),
    ]  # fmt: skip


def decode_event(item: list[Any]) -> Event:
    kind, *rest = item
    if kind == "call":
        call_id, result, error = rest
        return CallEvent(call_id, result, LorafleetError.from_dict(error) if error else None)
    request_id, token_id, logprob, finish_reason, stop_token_id, error, num_cached, *milestones = rest
    return TokenEvent(
        request_id,
        token_id,
        decode_logprob(logprob),
        finish_reason,
        stop_token_id,
        LorafleetError.from_dict(error) if error else None,
        num_cached,
        decode_milestones(milestones),
    )


def encode_logprob(logprob: TokenLogprob | None) -> list[Any] | None:
    return None if logprob is None else [logprob.token_id, logprob.logprob, logprob.top]


def decode_logprob(item: list[Any] | None) -> TokenLogprob | None:
    if item is None:
        return None
    token_id, value, top = item
    return TokenLogprob(token_id, value, tuple((token, best) for token, best in top))


def encode_milestones(milestones: Milestones | None) -> list[Any]:
    """Items at the end of a positional message; none, as nearly always, take no bytes."""
    return [] if milestones is None else [astuple(milestones)]


def decode_milestones(items: list[Any]) -> Milestones | None:
    return Milestones(*items[0]) if items else None


def read_exactly(sock: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """As `read_frame`; raises OSError at the deadline. Takes memory for what has come only."""
    received = bytearray()
    while len(received) < length:
        if deadline is not None:
            sock.settimeout(max(0.0, deadline - time.monotonic()))
        part = sock.recv(min(length - len(received), _MOST_AT_ONCE))
        if not part:
            raise EOFError("the other side of the socket is gone")
        received += part
    return bytes(received)
