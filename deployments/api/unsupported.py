"""Fields that would change the answer and are not supported: refused by name, never ignored.

The table holds, for each field, the values that ask for nothing. Fields that are in no request model and not
here are ignored, as gateways add their own.
"""

from __future__ import annotations

from typing import Any

from deployments.api.protocol import ChatCompletionRequest, CompletionRequest
from engine.errors import InvalidRequest

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "prompt_embeds": (),
    "cache_salt": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}


def refuse_unsupported(request: CompletionRequest | ChatCompletionRequest) -> None:
    """Raises InvalidRequest, its `param` naming the field."""
    given = request.model_extra or {}
    for field, value in given.items():
        if field in _NEUTRAL and value is not None and value not in _NEUTRAL[field]:
            raise _refusal(field)
    if given.get("tools") and given.get("tool_choice") != "none":
        raise _refusal("tools")
    if given.get("best_of") not in (None, request.num_choices):
        raise InvalidRequest("best_of other than n is not supported", param="best_of")
    if isinstance(request, CompletionRequest):
        _refuse(given, "add_special_tokens", unless=True)
    else:
        _refuse(given, "add_special_tokens", unless=False)
        _refuse(given, "echo", unless=False)


def _refuse(given: dict[str, Any], field: str, unless: bool) -> None:
    if given.get(field) not in (None, unless):
        raise _refusal(field)


def _refusal(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is not supported", param=field, code="unsupported_parameter")
