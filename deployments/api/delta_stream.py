"""The engine calls of one HTTP request, merged: one call per prompt, one numbering of choices.

Owns the calls' life (closing it aborts what runs), the token counts and the promise that every choice ends
exactly once or the stream raises. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.service import TokenSource, close
from engine.errors import Unavailable
from engine.request import FinishReason, GenerateRequest, OutputDelta, TokenLogprob

Batch = list[OutputDelta]  # at most one delta a choice; `index` counts over all prompts


@dataclass(slots=True)
class CollectedChoice:
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class DeltaStream:
    """An iterator of batches. Its owner must `aclose` it. Prompt i has the choices i * n to i * n + n - 1."""

    def __init__(self, service: TokenSource, requests: Sequence[GenerateRequest]) -> None:
        self._merged = _merge(service, requests)
        self._requests = requests
        self._first: Batch | None = None
        self._n = requests[0].params.n
        self.num_choices = self._n * len(requests)
        self._unfinished = set(range(self.num_choices))
        self._num_output_tokens = [0] * self.num_choices
        self._num_cached_tokens: dict[int, int] = {}  # by prompt, as its first delta says

    async def pull_first(self) -> None:
        """Raises what fails before any output, while the response can still carry a status."""
        self._first = await anext(self)

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Batch:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            prompt_index, deltas = await anext(self._merged)
        except StopAsyncIteration:
            if self._unfinished:  # never a silent end
                raise Unavailable("the request was cut off by its engine") from None
            raise
        return [self._account(prompt_index, delta) for delta in _coalesced(deltas)]

    async def collect(self) -> list[CollectedChoice]:
        """All of it, and closes."""
        choices = [CollectedChoice(index) for index in range(self.num_choices)]
        async with aclosing(self):
            async for batch in self:
                for delta in batch:
                    choices[delta.index].add(delta)
        return choices

    def usage(self) -> dict[str, Any]:
        """So far. Prompt tokens count once per prompt, however many choices it has."""
        prompt = sum(len(request.prompt_token_ids) for request in self._requests)
        completion = sum(self._num_output_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }

    async def aclose(self) -> None:
        await self._merged.aclose()

    def _account(self, prompt_index: int, delta: OutputDelta) -> OutputDelta:
        if delta.finish_reason == "abort":
            raise Unavailable("the request was aborted by its engine")
        self._num_cached_tokens.setdefault(prompt_index, delta.num_cached_tokens)
        index = prompt_index * self._n + delta.index
        assert index in self._unfinished, f"choice {index} goes on after its end"
        self._num_output_tokens[index] = delta.num_output_tokens
        if delta.finish_reason is not None:
            self._unfinished.remove(index)
        return delta if index == delta.index else replace(delta, index=index)


def _coalesced(deltas: list[OutputDelta]) -> list[OutputDelta]:
    """Joins the deltas of each choice: a client gets one chunk for what came at once."""
    if len(deltas) == 1:
        return deltas
    joined: dict[int, OutputDelta] = {}
    for delta in deltas:
        before = joined.get(delta.index)
        joined[delta.index] = delta if before is None else _join(before, delta)
    return list(joined.values())


def _join(a: OutputDelta, b: OutputDelta) -> OutputDelta:
    assert a.finish_reason is None, f"choice {a.index} goes on after its end"
    logprobs = None if a.logprobs is None and b.logprobs is None else (a.logprobs or ()) + (b.logprobs or ())
    return replace(b, text=a.text + b.text, token_ids=a.token_ids + b.token_ids, logprobs=logprobs)


_Item = tuple[int, list[OutputDelta]]  # prompt index, deltas


async def _merge(service: TokenSource, requests: Sequence[GenerateRequest]) -> AsyncGenerator[_Item]:
    """In the order of arrival. The first error ends all."""
    if len(requests) == 1:  # the usual case needs no task
        source = service.generate(requests[0])
        try:
            async for deltas in source:
                yield 0, deltas
        finally:
            await close(source)
        return
    queue: asyncio.Queue[_Item | Exception | None] = asyncio.Queue(maxsize=len(requests))
    tasks = [
        asyncio.create_task(_pump(service, request, index, queue)) for index, request in enumerate(requests)
    ]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    service: TokenSource,
    request: GenerateRequest,
    index: int,
    queue: asyncio.Queue[_Item | Exception | None],
) -> None:
    try:
        source = service.generate(request)
        try:
            async for deltas in source:
                await queue.put((index, deltas))
        finally:
            await close(source)
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
