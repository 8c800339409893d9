"""What an adapter's tokenizer files change: its chat template. Tokens it adds are found, to be refused.

The base model's tokenizer serves every adapter; an adapter's own is never loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from engine.adapters.files import (
    ADDED_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from engine.adapters.reader import MAX_SMALL_FILE_BYTES, FileReader
from engine.errors import AdapterRefused

_ID = re.compile("[0-9]{1,9}")  # Python makes no number of more than 4300 digits


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    chat_template: str | None  # None: the base model's is used
    added_tokens: dict[str, int]  # text -> id, of those beyond the plain vocabulary


def read(reader: FileReader) -> TokenizerFiles:
    """Raises AdapterRefused, its `param` naming the file."""
    config = _parse_object(TOKENIZER_CONFIG_FILE, reader.read_small(TOKENIZER_CONFIG_FILE))
    template = reader.read_small(TEMPLATE_FILE)
    return TokenizerFiles(
        chat_template=_decode(TEMPLATE_FILE, template) if template else _template_of(config),
        added_tokens=_added_tokens(reader, config),
    )


def _template_of(config: dict[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise AdapterRefused(f"{TOKENIZER_CONFIG_FILE}: chat_template is no string", param="chat_template")
    return template or None


def _added_tokens(reader: FileReader, config: dict[str, Any]) -> dict[str, int]:
    tokens: dict[str, Any] = _parse_object(ADDED_TOKENS_FILE, reader.read_small(ADDED_TOKENS_FILE))
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for token_id, entry in decoder.items():
            tokens[_content(entry)] = int(token_id) if _ID.fullmatch(token_id) else None
    elif reader.listing.find(TOKENIZER_FILE) is not None:
        for entry in _list_in_head(reader.read_head(TOKENIZER_FILE, MAX_SMALL_FILE_BYTES)):
            tokens[_content(entry)] = entry.get("id") if isinstance(entry, dict) else None
    if not all(isinstance(token_id, int) for token_id in tokens.values()):
        raise AdapterRefused("the tokenizer's added tokens are malformed", param="added_tokens")
    return tokens


def _list_in_head(head: bytes) -> list[Any]:
    """`added_tokens` of a tokenizer.json, which opens with it. The vocabulary after it can be 20 MB long."""
    text = head.decode(errors="ignore")
    start = text.find('"added_tokens"')
    bracket = text.find("[", start)
    if start < 0 or bracket < 0:
        return []
    try:
        entries, _ = json.JSONDecoder().raw_decode(text, bracket)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{TOKENIZER_FILE}: added_tokens is malformed", param=TOKENIZER_FILE) from error
    return list(entries)


def _content(entry: object) -> str:
    return str(entry.get("content")) if isinstance(entry, dict) else str(entry)


def _parse_object(name: str, content: bytes | None) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        value = json.loads(_decode(name, content))
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{name} is not valid JSON", param=name) from error
    if not isinstance(value, dict):
        raise AdapterRefused(f"{name} holds no JSON object", param=name)
    return value


def _decode(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise AdapterRefused(f"{name} is not UTF-8", param=name) from error
