"""Renders chat templates as Hugging Face does, in jinja's sandbox.

Run as a program, it serves untrusted templates: one JSON request a line on stdin, one JSON reply a line on
stdout. The sandbox keeps a template from reaching Python, but not from looping or from doubling a string
until memory is full; so the program limits its own CPU time and memory, and the kernel ends it. It imports
nothing of ours, so that it starts fast and from any path.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_COMPILED = 256  # templates
MAX_TEMPLATE_CHARS = 1 << 18
MAX_PROMPT_CHARS = 1 << 23
MAX_RENDER_CPU_S = 0.5
MAX_MEMORY_BYTES = 512 << 20
READY = "ready\n"


class RenderError(Exception):
    """The template cannot be compiled or failed on these messages; the text may be shown to a client."""


class TemplateRenderer:
    def __init__(self) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._compile: Callable[[str], Template] = functools.lru_cache(MAX_COMPILED)(environment.from_string)

    def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        special_tokens: Mapping[str, str],
    ) -> str:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise RenderError(f"it has more than {MAX_TEMPLATE_CHARS} characters")
        variables: dict[str, Any] = {"tools": None, "documents": None, **special_tokens}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._compile(source).render(variables)
        except Exception as error:  # a template can fail in every way that Python can
            # with half a surrogate pair in it the answer could not be sent
            reason = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            raise RenderError(reason) from error
        if len(text) > MAX_PROMPT_CHARS:
            raise RenderError(f"its output has more than {MAX_PROMPT_CHARS} characters")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError("its output has half a surrogate pair") from error
        return text


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # jinja's own prints nothing until its result is used
        raise SecurityError(f"access to {attribute} is not allowed")


class _GenerationTag(Extension):
    """`{% generation %}` marks text to train on; it means nothing here."""

    tags = {"generation"}  # noqa: RUF012  # jinja declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML characters
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def serve() -> None:
    renderer = TemplateRenderer()
    with contextlib.suppress(ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    sys.stdout.write(READY)
    sys.stdout.flush()
    for line in sys.stdin:
        # no handler: the signal ends the process, even inside one long C call
        signal.setitimer(signal.ITIMER_PROF, MAX_RENDER_CPU_S)
        try:
            reply = {"text": renderer.render(**json.loads(line))}
        except RenderError as error:
            reply = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
