"""POST /v1/chat/completions: from messages to a prompt, from deltas to OpenAI's chat objects."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from deployments.api.bodies import Unchecked, checked
from deployments.api.delta_stream import Batch, CollectedChoice, DeltaStream
from deployments.api.disconnect import unless_disconnected
from deployments.api.logprobs import chat_logprobs
from deployments.api.model_resolver import ModelResolver
from deployments.api.prompts import PromptEncoder, PromptTokenizer
from deployments.api.protocol import ChatCompletionRequest
from deployments.api.request_id import engine_request_id
from deployments.api.sse import DONE, SseResponse, event
from deployments.api.unsupported import refuse_unsupported
from deployments.service import TokenSources
from engine.request import FinishReason, GenerateRequest, TokenLogprob


class ChatCompletions:
    def __init__(self, sources: TokenSources, resolver: ModelResolver, prompts: PromptEncoder) -> None:
        self._sources = sources
        self._resolver = resolver
        self._prompts = prompts

    async def create(self, body: Unchecked[ChatCompletionRequest], request: Request) -> Response:
        body = await checked(ChatCompletionRequest, body, request)
        answer = self._answer(body, f"chatcmpl-{request.state.request_id}")
        return await unless_disconnected(request.receive, answer)

    async def _answer(self, body: ChatCompletionRequest, response_id: str) -> Response:
        refuse_unsupported(body)
        body.check_stream_options()
        params = body.sampling_params()
        self._prompts.check_sampling(params)
        model = await self._resolver.resolve(body.model)
        prompt = await self._prompts.chat_prompt(
            body.messages, model.chat_template, body.add_generation_prompt is not False
        )
        params = self._prompts.fit(
            params, len(prompt), prompt_param="messages", max_tokens_param=body.max_tokens_param
        )
        engine_id = engine_request_id(response_id, 0)
        request = GenerateRequest(engine_id, prompt, params, model.adapter, body.timeout_s)
        deltas = DeltaStream(self._sources.source(body.stream), [request])
        head = {"id": response_id, "created": int(time.time()), "model": model.name}
        if body.stream:
            writer = ChatChunks(head, deltas, self._prompts.tokenizer, body.include_usage)
            return await SseResponse.start(deltas, writer)
        return JSONResponse(await self._completion(head, deltas, with_logprobs=bool(body.logprobs)))

    async def _completion(
        self, head: dict[str, Any], deltas: DeltaStream, with_logprobs: bool
    ) -> dict[str, Any]:
        def choice(collected: CollectedChoice) -> dict[str, Any]:
            logprobs = collected.logprobs if with_logprobs else None
            return {
                "message": {"role": "assistant", "content": collected.text, "refusal": None},
                **_choice_fields(self._prompts.tokenizer, collected.index, logprobs, collected.finish_reason),
                "stop_reason": collected.stop_reason,
            }

        choices = [choice(collected) for collected in await deltas.collect()]
        return {**head, "object": "chat.completion", "choices": choices, "usage": deltas.usage()}


class ChatChunks:
    """The events of one streamed chat completion."""

    def __init__(
        self, head: dict[str, Any], deltas: DeltaStream, tokenizer: PromptTokenizer, include_usage: bool
    ) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        if include_usage:
            self._head["usage"] = None  # in every chunk but the last
        self._deltas = deltas
        self._tokenizer = tokenizer
        self._include_usage = include_usage

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event({"delta": delta, **_choice_fields(self._tokenizer, index, None, None)})
            for index in range(self._deltas.num_choices)
        )

    def write(self, batch: Batch) -> bytes:
        events: list[bytes] = []
        for delta in batch:
            if not delta.text and delta.logprobs is None and delta.finish_reason is None:
                continue  # text is held back
            choice = {
                "delta": {"content": delta.text} if delta.text else {},
                **_choice_fields(self._tokenizer, delta.index, delta.logprobs, delta.finish_reason),
            }
            if delta.stop_reason is not None:
                choice["stop_reason"] = delta.stop_reason
            events.append(self._event(choice))
        return b"".join(events)

    def closing(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._deltas.usage()}) + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        return event({**self._head, "choices": [choice]})


def _choice_fields(
    tokenizer: PromptTokenizer,
    index: int,
    logprobs: list[TokenLogprob] | tuple[TokenLogprob, ...] | None,
    finish_reason: FinishReason | None,
) -> dict[str, Any]:
    return {
        "index": index,
        "logprobs": None if logprobs is None else chat_logprobs(tokenizer, logprobs),
        "finish_reason": finish_reason,
    }
