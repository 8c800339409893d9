from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.source import describe, open_reader, read_adapter_files, read_chat_template
from engine.adapters.tokenizer_files import TokenizerFiles
from engine.errors import AdapterRefused
from tests.engine.adapters.adapter_dirs import load, write_adapter

TEMPLATE = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"


def read(path: Path, files: dict[str, Any]) -> TokenizerFiles:
    contents = {
        name: content if isinstance(content, str) else json.dumps(content) for name, content in files.items()
    }
    return read_adapter_files(open_reader(describe(str(write_adapter(path / "a", files=contents))))).tokenizer


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"model_max_length": 100}}, None),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"tokenizer_config.json": {"chat_template": ""}}, None),
        ({"chat_template.jinja": ""}, None),
        ({"tokenizer_config.json": {"chat_template": TEMPLATE}}, TEMPLATE),
        ({"chat_template.jinja": TEMPLATE}, TEMPLATE),
        ({"chat_template.jinja": TEMPLATE, "tokenizer_config.json": {"chat_template": "old"}}, TEMPLATE),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "t"}]}},
            None,
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": ["default"], "template": "t"}, 3]}}, None),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": TEMPLATE},
                    ]
                }
            },
            TEMPLATE,
        ),
    ],
)
def test_an_adapters_own_chat_template_is_found(
    files: dict[str, Any], template: str | None, tmp_path: Path
) -> None:
    """FR-57: tokenizer files without a template leave the base model's in place."""
    assert read(tmp_path, files).chat_template == template
    assert read_chat_template(str(tmp_path / "a")) == template
    image = load(tmp_path / "a")
    assert image.chat_template == template
    assert image.report["chat_template"] == ("adapter" if template else "base")


DECODER = {"256": {"content": "<x>", "special": True}, "7": {"content": "<y>"}}
FAST = {
    "version": "1.0",
    "added_tokens": [{"id": 256, "content": "<x>"}, {"id": 7, "content": "<y>"}],
    "model": {"vocab": {"[": 1}},
}


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<x>": 256, "<y>": 7}},
        {"tokenizer_config.json": {"added_tokens_decoder": DECODER}},
        {"tokenizer.json": FAST},
        {"tokenizer.json": FAST, "tokenizer_config.json": {"backend": "tokenizers"}},
        {"tokenizer_config.json": {"added_tokens_decoder": DECODER}, "tokenizer.json": {"added_tokens": []}},
    ],
)
def test_added_tokens_are_found_in_any_file_that_lists_them(files: dict[str, Any], tmp_path: Path) -> None:
    """FR-57."""
    assert read(tmp_path, files).added_tokens == {"<x>": 256, "<y>": 7}


def test_a_large_vocabulary_is_not_read(tmp_path: Path) -> None:
    large = {**FAST, "model": {"vocab": {f"token{i}": i for i in range(100_000)}}}
    assert read(tmp_path, {"tokenizer.json": large}).added_tokens == {"<x>": 256, "<y>": 7}


def test_a_tokenizer_without_added_tokens_adds_none(tmp_path: Path) -> None:
    assert read(tmp_path, {"tokenizer.json": {"model": {"vocab": {}}}}).added_tokens == {}


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": {"chat_template": 3}}, "chat_template"),
        ({"added_tokens.json": "[" * 100_000}, "added_tokens.json"),
        ({"added_tokens.json": {"<x>": "256"}}, "added_tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "<x>"}}}}, "added_tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"9" * 5000: "<x>"}}}, "added_tokens"),
        ({"tokenizer.json": '{"added_tokens": [{"id": 1'}, "tokenizer.json"),
        ({"tokenizer.json": {"added_tokens": [3]}}, "added_tokens"),
        ({"tokenizer_config.json": json.dumps({"x": "y" * (1 << 20)})}, "tokenizer_config.json"),
        ({"chat_template.jinja": "x" * ((1 << 20) + 1)}, "chat_template.jinja"),
    ],
)
def test_malformed_or_huge_tokenizer_files_are_refused_by_name(
    files: dict[str, Any], param: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterRefused) as caught:
        read(tmp_path, files)
    assert caught.value.param == param


def test_a_template_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(AdapterRefused) as caught:
        read_chat_template(str(path))
    assert caught.value.param == "chat_template.jinja"
