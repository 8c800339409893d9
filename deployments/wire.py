"""Output deltas and errors as JSON, so that they survive every transport of Serve.

A chunk of a stream is JSON: a list of deltas, or {"error": LorafleetError.to_dict()} as the last one. The
answer of a call is {"result": ...} or such an error: exceptions change their class on some transports.
Requests and adapter references cross as `engine.wire` encodes them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Sequence
from typing import Any

from engine.errors import LorafleetError
from engine.request import OutputDelta
from engine.wire import decode_logprob, decode_milestones, encode_logprob, encode_milestones


def encode_deltas(deltas: Sequence[OutputDelta]) -> bytes:
    return json.dumps([_delta_to_json(delta) for delta in deltas], separators=(",", ":")).encode()


def encode_error(error: LorafleetError) -> bytes:
    return json.dumps({"error": error.to_dict()}).encode()


def decode_chunk(chunk: bytes) -> list[OutputDelta]:
    """Raises the LorafleetError that the chunk carries."""
    data = json.loads(chunk)
    if isinstance(data, dict):
        raise LorafleetError.from_dict(data["error"])
    return [_delta_from_json(item) for item in data]


async def to_answer(call: Awaitable[Any]) -> dict[str, Any]:
    try:
        return {"result": await call}
    except LorafleetError as error:
        return {"error": error.to_dict()}


def from_answer(answer: dict[str, Any]) -> Any:
    """Raises the LorafleetError that the answer carries."""
    if "error" in answer:
        raise LorafleetError.from_dict(answer["error"])
    return answer["result"]


def _delta_to_json(delta: OutputDelta) -> list[Any]:
    # positional: half the bytes and half the time of objects
    return [
        delta.index, delta.text, delta.token_ids,
        None if delta.logprobs is None else [encode_logprob(logprob) for logprob in delta.logprobs],
        delta.finish_reason, delta.stop_reason,
        delta.num_prompt_tokens, delta.num_cached_tokens, delta.num_output_tokens,
        *encode_milestones(delta.milestones),
    ]  # fmt: skip


def _delta_from_json(item: list[Any]) -> OutputDelta:
    index, text, token_ids, logprobs, finish_reason, stop_reason, prompt, cached, output, *milestones = item
    decoded = None if logprobs is None else [decode_logprob(logprob) for logprob in logprobs]
    return OutputDelta(
        index=index,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=None if decoded is None else tuple(lp for lp in decoded if lp is not None),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
        milestones=decode_milestones(milestones),
    )
