"""Bodies that clients send, checked by type, and their mapping to sampling parameters.

Fields that change no answer (`user`, `metadata`, `store`, ...) are ignored; fields that would change it and
are not supported are refused by name, see `unsupported.py`. Limits of value are SamplingParams' business.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from engine.errors import InvalidRequest
from engine.sampling_params import MAX_TOP_LOGPROBS, SamplingParams

INT32_MAX = (1 << 31) - 1
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        raise ValueError("not valid Unicode") from None
    return text


def _check_few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"at most {MAX_LOGIT_BIAS} entries")
    return value


T = TypeVar("T")
# one error per list: a body may hold a million wrong items
ListOf = Annotated[list[T], Field(fail_fast=True)]
Text = Annotated[str, AfterValidator(_check_text)]
Int = Annotated[int, Strict()]  # JSON's true and "5" are no numbers
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]
TokenIds = ListOf[Int]
Bias = Annotated[Float, Field(ge=-100, le=100)]

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"max_tokens", "logprobs", "stop"}


class StreamOptions(BaseModel):
    include_usage: Bool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions share. None always means: the default."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    n: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Annotated[Int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Float | None = None
    seed: Int | None = None
    stop: Text | ListOf[Text] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: Bool | None = None
    ignore_eos: Bool | None = None
    frequency_penalty: Float | None = None
    presence_penalty: Float | None = None
    repetition_penalty: Float | None = None
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_check_few)] | None = None
    timeout_s: Annotated[Float, Field(gt=0)] | None = None  # ours: refuse rather than start later than this

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", param="stream_options")

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given = self.model_dump(include=_SAMPLING_FIELDS, exclude_none=True)
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(**given, stop=stop, max_tokens=max_tokens, logprobs=logprobs)


class CompletionRequest(GenerationRequest):
    prompt: Text | ListOf[Text] | TokenIds | ListOf[TokenIds]
    echo: Bool | None = None
    logprobs: Int | None = None

    def sampling_params(self) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("logprobs of an echoed prompt are not supported", param="logprobs")
        return self._sampling_params(self.max_tokens, self.logprobs)


class ContentPart(BaseModel):
    type: str
    text: Text | None = None

    def checked_text(self) -> str:
        if self.type != "text":
            raise InvalidRequest("messages: only content parts of type text are supported", param="messages")
        if self.text is None:
            raise InvalidRequest("messages: a text part needs its text", param="messages")
        return self.text


class ChatMessage(BaseModel):
    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | ListOf[ContentPart] | None = None
    name: Text | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    def for_template(self) -> dict[str, str]:
        """As a chat template sees it: content is always text."""
        message = {"role": self.role, "content": self._text()}
        return message if self.name is None else {**message, "name": self.name}

    def _text(self) -> str:
        if self.tool_calls or self.function_call:
            raise InvalidRequest("messages: tool calls are not supported", param="messages")
        if isinstance(self.content, list):
            return "\n".join(part.checked_text() for part in self.content)
        if self.content is None and self.role != "assistant":
            raise InvalidRequest("messages: content is missing", param="messages")
        return self.content or ""


class ChatCompletionRequest(GenerationRequest):
    messages: ListOf[ChatMessage]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: Bool | None = None

    @property
    def max_tokens_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(BaseModel):
    model: str | None = None  # None: the base model
    prompt: Text | None = None
    messages: ListOf[ChatMessage] | None = None
    add_special_tokens: Bool = True  # to a prompt; a chat template brings its own
    add_generation_prompt: Bool = True


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: TokenIds


class LoadAdapterRequest(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: Bool = False
    # ours: answer this part of the name's requests from lora_path, the others as before; 0 ends it
    canary_weight: Annotated[Float, Field(ge=0, lt=1)] | None = None


class UnloadAdapterRequest(BaseModel):
    lora_name: str


class PinAdapterRequest(BaseModel):
    lora_name: str
