"""Prompts of requests as token ids that the engine can take: encoded, known to the vocabulary, short enough.

Knows nothing of HTTP. Every fault is an InvalidRequest that names the client's field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from deployments.api.chat_template import ChatTemplates
from deployments.api.off_loop import off_loop
from deployments.api.protocol import ChatMessage
from engine.errors import InvalidRequest, RequestTooLarge
from engine.sampling_params import SamplingParams

MAX_PROMPTS = 256  # in one completion request
TOKEN_ID_LIMIT = 1 << 31


class PromptTokenizer(Protocol):
    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_tokens_map(self) -> Mapping[str, str]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def knows(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class PromptEncoder:
    def __init__(self, tokenizer: PromptTokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._templates = ChatTemplates(tokenizer.chat_template, tokenizer.special_tokens_map)

    async def completion_prompts(
        self, prompt: str | list[str] | list[int] | list[list[int]]
    ) -> list[tuple[int, ...]]:
        """One or more prompts, none of them empty."""
        prompts = _as_list(prompt)
        if not prompts:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt")
        size = sum(map(len, prompts))
        encoded = await off_loop(size, lambda: [self._completion_prompt(one) for one in prompts])
        if not all(encoded):
            raise InvalidRequest("prompt must hold at least one token", param="prompt")
        return encoded

    async def chat_prompt(
        self, messages: Sequence[ChatMessage], own_template: str | None, add_generation_prompt: bool
    ) -> tuple[int, ...]:
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        text = await self._templates.render(own_template, messages, add_generation_prompt)
        # the template writes the special tokens itself
        token_ids = await self.encode(text, add_special_tokens=False)
        if not token_ids:
            raise InvalidRequest("messages give an empty prompt", param="messages")
        return tuple(token_ids)

    def close(self) -> None:
        self._templates.close()

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await off_loop(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def texts(self, prompts: Sequence[Sequence[int]], param: str) -> list[str]:
        """Of token ids, special ones too. Raises InvalidRequest, naming `param`, for an unknown one."""

        def convert() -> list[str]:
            for prompt in prompts:
                self.check_known(prompt, param)
            return [self.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]

        return await off_loop(sum(map(len, prompts)), convert)

    def check_known(self, token_ids: Iterable[int], param: str) -> None:
        for token_id in token_ids:
            if not (0 <= token_id < TOKEN_ID_LIMIT and self.tokenizer.knows(token_id)):
                raise InvalidRequest(f"{param}: token id {token_id} is not in the vocabulary", param=param)

    def check_sampling(self, params: SamplingParams) -> None:
        self.check_known(params.stop_token_ids, "stop_token_ids")
        self.check_known(params.logit_bias, "logit_bias")

    def fit(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        *,
        prompt_param: str,
        max_tokens_param: str = "max_tokens",
        default_max_tokens: int | None = None,
    ) -> SamplingParams:
        """With the default for max_tokens set, as far as there is room. None: all the room.

        Raises RequestTooLarge if what the client asked for exceeds the context window.
        """
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise self._too_large(prompt_param, num_prompt_tokens, 1)
        if params.max_tokens is not None and params.max_tokens > room:
            raise self._too_large(max_tokens_param, num_prompt_tokens, params.max_tokens)
        if params.min_tokens > room:
            raise self._too_large("min_tokens", num_prompt_tokens, params.min_tokens)
        if params.max_tokens is None and default_max_tokens is not None:
            return replace(params, max_tokens=min(default_max_tokens, room))
        return params

    def _too_large(self, param: str, num_prompt_tokens: int, num_output_tokens: int) -> RequestTooLarge:
        return RequestTooLarge(
            f"a prompt of {num_prompt_tokens} tokens and an answer of {num_output_tokens} exceed "
            f"the context window of {self.max_model_len} tokens",
            param=param,
        )

    def _completion_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
        self.check_known(prompt, "prompt")
        return tuple(prompt)


def _as_list(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[return-value]
