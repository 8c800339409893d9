"""Chat templates, compared with what Hugging Face's rules say."""

from __future__ import annotations

import pytest

from deployments.api.template_renderer import (
    MAX_PROMPT_CHARS,
    MAX_TEMPLATE_CHARS,
    RenderError,
    TemplateRenderer,
)

MESSAGES = [{"role": "user", "content": "<hi> & 'ü'"}, {"role": "assistant", "content": "yo"}]


def render(source: str) -> str:
    return TemplateRenderer().render(source, MESSAGES, True, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[1]['role'] }}{{ eos_token }}", "<s>assistant</s>"),
        ("{{ messages[0].content }}", "<hi> & 'ü'"),
        ("{{ messages[0].content | tojson }}", "\"<hi> & 'ü'\""),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}", "x"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("  {% if add_generation_prompt %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "yo!"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ pad_token }}", ""),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)  # fmt: skip
def test_template_renders_as_hugging_face_does(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('system role is not supported') }}", "system role is not supported"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ missing.field }}", "UndefinedError"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}", "SecurityError"),
        ("{{ range(1000000) }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x'.encode('nope') }}", "LookupError"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "characters"),
        ("{{ 'x' * 9000000 }}", f"{MAX_PROMPT_CHARS} characters"),
        ("a\ud800", "surrogate"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{{ raise_exception('\\ud800') }}", r"\\ud800"),
    ],
)
def test_every_failure_of_a_template_is_one_error(source: str, reason: str) -> None:
    """FR-57."""
    with pytest.raises(RenderError, match=reason) as caught:
        render(source)
    assert str(caught.value).encode()  # it can be sent


def test_template_cannot_change_the_messages_of_the_next_one() -> None:
    with pytest.raises(RenderError):
        render("{% set _ = messages[0].update({'role': 'system'}) %}")
    assert MESSAGES[0]["role"] == "user"
