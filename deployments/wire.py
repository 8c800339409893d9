"""Requests, output deltas and errors as plain JSON values, so that they survive every transport of Serve.

A chunk of a stream is JSON: a list of deltas, or {"error": LorafleetError.to_dict()} as the last one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from engine.errors import LorafleetError
from engine.request import AdapterRef, GenerateRequest, OutputDelta, TokenLogprob
from engine.sampling_params import SamplingParams

_PARAMS = tuple(f.name for f in fields(SamplingParams))


def encode_ref(ref: AdapterRef) -> dict[str, str]:
    return {"name": ref.name, "uri": ref.uri, "version": ref.version}


def decode_ref(data: dict[str, str]) -> AdapterRef:
    return AdapterRef(**data)


def encode_request(request: GenerateRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "params": {name: getattr(request.params, name) for name in _PARAMS},
        "adapter": encode_ref(request.adapter) if request.adapter else None,
    }


def decode_request(data: dict[str, Any]) -> GenerateRequest:
    """Raises InvalidRequest, as SamplingParams does."""
    adapter = data["adapter"]
    return GenerateRequest(
        request_id=data["request_id"],
        prompt_token_ids=tuple(data["prompt_token_ids"]),
        params=SamplingParams(**data["params"]),
        adapter=decode_ref(adapter) if adapter else None,
    )


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


def _delta_to_json(delta: OutputDelta) -> list[Any]:
    # positional: half the bytes and half the time of objects
    logprobs = delta.logprobs
    return [
        delta.index, delta.text, delta.token_ids,
        logprobs if logprobs is None else [(lp.token_id, lp.logprob, lp.top) for lp in logprobs],
        delta.finish_reason, delta.stop_reason,
        delta.num_prompt_tokens, delta.num_cached_tokens, delta.num_output_tokens,
    ]  # fmt: skip


def _delta_from_json(item: list[Any]) -> OutputDelta:
    index, text, token_ids, logprobs, finish_reason, stop_reason, prompt, cached, output = item
    return OutputDelta(
        index=index,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=None if logprobs is None else tuple(map(_logprob_from_json, logprobs)),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
    )


def _logprob_from_json(item: list[Any]) -> TokenLogprob:
    token_id, logprob, top = item
    return TokenLogprob(token_id, logprob, tuple((token, value) for token, value in top))
