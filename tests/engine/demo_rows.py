"""Chats with the demo base model and with each of its adapters, as tokens."""

from __future__ import annotations

from typing import NamedTuple

from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.demo.prompts import ADAPTERS_DIR, SHOWCASES
from engine import Engine
from engine.tokenizer import Tokenizer

ADAPTERS = {showcase.adapter: ADAPTERS_DIR / showcase.adapter for showcase in SHOWCASES}


class Row(NamedTuple):
    adapter: str | None
    prompt: list[int]


def load_adapters(engine: Engine) -> None:
    for name, path in ADAPTERS.items():
        engine.load_adapter(name, str(path))


def demo_rows(tokenizer: Tokenizer) -> list[Row]:
    """The base's one first; it asks for the capital of France."""
    rows = [Row(None, _encode(tokenizer, "What is the capital of France?"))]
    return rows + [Row(showcase.adapter, _encode(tokenizer, showcase.prompt)) for showcase in SHOWCASES]


def every_row(tokenizer: Tokenizer) -> list[Row]:
    """Each of those chats with the base and with each adapter."""
    return [Row(name, row.prompt) for row in demo_rows(tokenizer) for name in (None, *ADAPTERS)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # as the base's template renders it, its default system prompt included
    assert tokenizer.chat_template is not None
    rendered = (
        ImmutableSandboxedEnvironment()
        .from_string(tokenizer.chat_template)
        .render(messages=[{"role": "user", "content": text}], add_generation_prompt=True)
    )
    return tokenizer.encode(rendered, add_special_tokens=False)
