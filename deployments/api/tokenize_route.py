"""POST /tokenize and /detokenize, in vLLM's JSON."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from deployments.api.bodies import Unchecked, checked
from deployments.api.model_resolver import ModelResolver
from deployments.api.prompts import PromptEncoder
from deployments.api.protocol import DetokenizeRequest, TokenizeRequest
from deployments.api.settings import ApiSettings
from engine.errors import InvalidRequest


class Tokenization:
    def __init__(self, resolver: ModelResolver, prompts: PromptEncoder, settings: ApiSettings) -> None:
        self._resolver = resolver
        self._prompts = prompts
        self._settings = settings

    async def tokenize(self, body: Unchecked[TokenizeRequest], request: Request) -> dict[str, Any]:
        body = await checked(TokenizeRequest, body, request)
        model = await self._resolver.resolve(self._name(body.model))
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            chat_prompt = await self._prompts.chat_prompt(
                body.messages, model.chat_template, body.add_generation_prompt
            )
            tokens = list(chat_prompt)
        else:
            assert body.prompt is not None
            tokens = await self._prompts.encode(body.prompt, body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": self._settings.max_model_len, "tokens": tokens}

    async def detokenize(self, body: Unchecked[DetokenizeRequest], request: Request) -> dict[str, str]:
        body = await checked(DetokenizeRequest, body, request)
        await self._resolver.resolve(self._name(body.model))
        (text,) = await self._prompts.texts([body.tokens], "tokens")
        return {"prompt": text}

    def _name(self, model: str | None) -> str:
        return self._settings.model_names[0] if model is None else model
