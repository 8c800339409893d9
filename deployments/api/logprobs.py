"""Log probabilities in OpenAI's two styles. A token that is part of a character is shown as its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.request import TokenLogprob

LOWEST = -9999.0  # JSON has no infinity


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(tokenizer: TokenBytes, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            **_chat_token(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in item.top],
        }
        for item in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: TokenBytes, logprobs: Sequence[TokenLogprob], num_chars: int = 0
) -> tuple[dict[str, Any], int]:
    """`num_chars`: of the choice's text so far, for the text offsets. Returns the new count too."""
    tokens: list[str] = []
    offsets: list[int] = []
    for item in logprobs:
        token = tokenizer.token_bytes(item.token_id)
        tokens.append(shown_token(token))
        # a token may go on with a character that an earlier one began
        offsets.append(num_chars - 1 if token and _continues(token[0]) else num_chars)
        num_chars += sum(not _continues(byte) for byte in token)
    fields = {
        "tokens": tokens,
        "token_logprobs": [max(item.logprob, LOWEST) for item in logprobs],
        "top_logprobs": [_top_with_chosen(tokenizer, item) for item in logprobs],
        "text_offset": offsets,
    }
    return fields, num_chars


def shown_token(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _continues(byte: int) -> bool:
    return byte & 0b1100_0000 == 0b1000_0000


def _chat_token(tokenizer: TokenBytes, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": shown_token(token), "logprob": max(logprob, LOWEST), "bytes": list(token)}


def _top_with_chosen(tokenizer: TokenBytes, item: TokenLogprob) -> dict[str, float]:
    """The best ones and the chosen one, so one more entry than asked for at most."""
    pairs = (*item.top, (item.token_id, item.logprob))
    return {shown_token(tokenizer.token_bytes(token_id)): max(logprob, LOWEST) for token_id, logprob in pairs}
