"""The engine as a plain Python object: no processes, no asyncio, no Ray."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from typing import Any

from engine.adapters.source import describe
from engine.building import build_core
from engine.choices import Choice, split_choices
from engine.config import EngineConfig
from engine.errors import InvalidRequest, ModelNotFound
from engine.events import CallEvent, Event, TokenEvent
from engine.loop import EngineLoop, Inbox
from engine.request import AdapterRef, GenerateRequest, OutputDelta, RequestOutput
from engine.sampling_params import SamplingParams
from engine.snapshot import snapshot
from engine.tokenizer import Tokenizer

_IDLE_WAIT_S = 1.0

Prompt = str | Sequence[int]


class Engine:
    """One caller at a time: it runs the step loop on the caller's thread."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises InvalidRequest for a model or a configuration that cannot be served."""
        inbox: Inbox = queue.SimpleQueue()
        self.config = config
        self.core = build_core(config, inbox)
        try:
            self.tokenizer = Tokenizer.from_pretrained(config.model)
        except BaseException:
            self.core.close()
            raise
        self._loop = EngineLoop(self.core, inbox)
        self._refs: dict[str, AdapterRef] = {}
        self._ids = map(str, itertools.count())

    def load_adapter(self, name: str, uri: str) -> dict[str, Any]:
        """Read and validate the adapter at `uri`, a directory or s3://bucket/prefix; returns the load report.

        A name that is loaded already is replaced. Raises AdapterRefused, ModelNotFound, AccessDenied or
        Unavailable, and then a version loaded before stays.
        """
        ref = AdapterRef(name, uri, describe(uri).version)
        call_id = next(self._ids)
        self.core.load_adapter(call_id, ref)
        report = self._wait_for(call_id)
        self._refs[name] = ref
        return report

    def unload_adapter(self, name: str) -> None:
        """Raises ModelNotFound."""
        call_id = next(self._ids)
        self.core.unload_adapter(call_id, name)
        self._wait_for(call_id)
        del self._refs[name]

    def pin_adapter(self, name: str) -> None:
        """Never evict it from the pool. Raises ModelNotFound or Conflict."""
        call_id = next(self._ids)
        self.core.pin_adapter(call_id, name)
        self._wait_for(call_id)

    def unpin_adapter(self, name: str) -> None:
        call_id = next(self._ids)
        self.core.unpin_adapter(call_id, name)
        self._wait_for(call_id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts as one batch; outputs in the order of the prompts, `n` for each.

        Raises InvalidRequest or ModelNotFound before anything runs; the first error of a request afterwards.
        """
        requests = self._requests(prompts, params, adapters)
        choices = {c.request.request_id: c for r in requests for c in split_choices(r, self.tokenizer)}
        deltas: dict[str, list[OutputDelta]] = {choice_id: [] for choice_id in choices}
        try:
            for choice in choices.values():
                self.core.add_request(choice.request)
            while any(not choice.is_finished for choice in choices.values()):
                for event in self._loop.turn(_IDLE_WAIT_S):
                    self._take(event, choices, deltas)
        except BaseException:
            for choice_id in choices:
                self.core.abort(choice_id)
            raise
        finally:
            self.core.take_events()  # of choices that were aborted: the next call does not know them
        return [_output(choice.request, deltas[choice_id]) for choice_id, choice in choices.items()]

    def stats(self) -> dict[str, Any]:
        return snapshot(self.core)

    def close(self) -> None:
        self.core.close()

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        adapters: Sequence[str | None] | None,
    ) -> list[GenerateRequest]:
        num = len(prompts)
        each = [params] * num if isinstance(params, SamplingParams) else list(params)
        names = [None] * num if adapters is None else list(adapters)
        if len(each) != num or len(names) != num:
            raise InvalidRequest(
                f"{num} prompts, {len(each)} params and {len(names)} adapters do not match", param="prompts"
            )
        return [
            GenerateRequest(next(self._ids), self._encode(prompt), one, self._ref(name))
            for prompt, one, name in zip(prompts, each, names, strict=True)
        ]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _ref(self, name: str | None) -> AdapterRef | None:
        if name is None:
            return None
        if name not in self._refs:
            raise ModelNotFound(f"adapter {name!r} is not loaded", param="adapters")
        return self._refs[name]

    def _take(self, event: Event, choices: dict[str, Choice], deltas: dict[str, list[OutputDelta]]) -> None:
        if not isinstance(event, TokenEvent):
            return
        choice = choices[event.request_id]
        delta = choice.feed(event)
        if delta is not None:
            deltas[event.request_id].append(delta)
        if choice.is_finished and event.finish_reason is None:
            self.core.abort(event.request_id)

    def _wait_for(self, call_id: str) -> dict[str, Any]:
        while True:
            for event in self._loop.turn(_IDLE_WAIT_S):
                if isinstance(event, CallEvent) and event.call_id == call_id:
                    if event.error is not None:
                        raise event.error
                    return event.result or {}


def _output(request: GenerateRequest, deltas: list[OutputDelta]) -> RequestOutput:
    last = deltas[-1]
    assert last.finish_reason is not None
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs or ())
    return RequestOutput(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        adapter=request.adapter.name if request.adapter else None,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
    )
