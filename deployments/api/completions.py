"""POST /v1/completions: one or many prompts, and from deltas to OpenAI's text completion objects."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from deployments.api.bodies import Unchecked, checked
from deployments.api.delta_stream import Batch, DeltaStream
from deployments.api.disconnect import unless_disconnected
from deployments.api.logprobs import TokenBytes, completion_logprobs
from deployments.api.model_resolver import ModelResolver, ResolvedModel
from deployments.api.prompts import PromptEncoder
from deployments.api.protocol import CompletionRequest
from deployments.api.request_id import engine_request_id
from deployments.api.sse import DONE, SseResponse, event
from deployments.api.unsupported import refuse_unsupported
from deployments.service import TokenSources
from engine.request import FinishReason, GenerateRequest, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # as OpenAI


class Completions:
    def __init__(self, sources: TokenSources, resolver: ModelResolver, prompts: PromptEncoder) -> None:
        self._sources = sources
        self._resolver = resolver
        self._prompts = prompts

    async def create(self, body: Unchecked[CompletionRequest], request: Request) -> Response:
        body = await checked(CompletionRequest, body, request)
        answer = self._answer(body, f"cmpl-{request.state.request_id}")
        return await unless_disconnected(request.receive, answer)

    async def _answer(self, body: CompletionRequest, response_id: str) -> Response:
        refuse_unsupported(body)
        body.check_stream_options()
        model = await self._resolver.resolve(body.model)
        requests = await self._generate_requests(body, model, response_id)
        deltas = DeltaStream(self._sources.source(body.stream), requests)
        head = {
            "id": response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        echoes = await self._echoes(requests) if body.echo else [""] * deltas.num_choices
        choices = ChoiceFormat(self._prompts.tokenizer)
        if body.stream:
            writer = CompletionChunks(head, deltas, choices, echoes, body.include_usage)
            return await SseResponse.start(deltas, writer)
        formatted = [
            choices.choice(
                choice.index,
                echoes[choice.index] + choice.text,
                choice.logprobs if body.logprobs is not None else None,
                choice.finish_reason,
                choice.stop_reason,
            )
            for choice in await deltas.collect()
        ]
        return JSONResponse({**head, "choices": formatted, "usage": deltas.usage()})

    async def _generate_requests(
        self, body: CompletionRequest, model: ResolvedModel, response_id: str
    ) -> list[GenerateRequest]:
        params = body.sampling_params()
        self._prompts.check_sampling(params)
        prompts = await self._prompts.completion_prompts(body.prompt)
        return [
            GenerateRequest(
                engine_request_id(response_id, index),
                prompt,
                self._prompts.fit(
                    params, len(prompt), prompt_param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS
                ),
                model.adapter,
                body.timeout_s,
            )
            for index, prompt in enumerate(prompts)
        ]

    async def _echoes(self, requests: Sequence[GenerateRequest]) -> list[str]:
        """The prompt's text, once per choice."""
        texts = await self._prompts.texts([request.prompt_token_ids for request in requests], "prompt")
        return [text for text, request in zip(texts, requests, strict=True) for _ in range(request.params.n)]


class ChoiceFormat:
    """Formats choices in pieces or whole. Remembers how far each one's text has come."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._tokenizer = tokenizer
        self._num_chars: dict[int, int] = defaultdict(int)  # by choice

    def choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        fields = None
        if logprobs is not None:
            fields, self._num_chars[index] = completion_logprobs(
                self._tokenizer, logprobs, self._num_chars[index]
            )
        return {
            "index": index,
            "text": text,
            "logprobs": fields,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class CompletionChunks:
    """The events of one streamed completion."""

    def __init__(
        self,
        head: dict[str, Any],
        deltas: DeltaStream,
        choices: ChoiceFormat,
        echoes: Sequence[str],
        include_usage: bool,
    ) -> None:
        # with usage asked for, it is null in every chunk but the last
        self._head = {**head, "usage": None} if include_usage else head
        self._deltas = deltas
        self._choices = choices
        self._echoes = echoes
        self._include_usage = include_usage

    def opening(self) -> bytes:
        return b"".join(
            self._event(self._choices.choice(index, text, None, None, None))
            for index, text in enumerate(self._echoes)
            if text
        )

    def write(self, batch: Batch) -> bytes:
        return b"".join(
            self._event(
                self._choices.choice(
                    delta.index, delta.text, delta.logprobs, delta.finish_reason, delta.stop_reason
                )
            )
            for delta in batch
            # else its text is held back
            if delta.text or delta.logprobs is not None or delta.finish_reason is not None
        )

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._deltas.usage()}) + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})
