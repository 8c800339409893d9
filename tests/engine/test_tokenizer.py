"""The wrapper over small, real tokenizers of both kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizer import LINES, byte_fallback_tokenizer, byte_level_tokenizer, wrap
from tests.pauses import longest_pause_of_threads
from tests.tiny import make_llama

TEXTS = (
    *LINES,
    "",
    " leading and trailing ",
    "emoji 😀🏳️‍🌈👩‍👩‍👧",
    "混ぜた text",
    "tab\tand\nnewline",
    "\x00\x7f€",
)
BOTH = pytest.mark.parametrize("build", [byte_level_tokenizer, byte_fallback_tokenizer])


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_decoding_undoes_encoding(build: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = build()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_of_a_byte_level_tokenizer_are_the_text(text: str) -> None:
    """FR-50: also of tokens that hold part of a character."""
    tokenizer = byte_level_tokenizer()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_of_a_byte_fallback_tokenizer_are_the_text_behind_a_space(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    expected = f" {text}".encode() if text else b""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == expected


def test_every_token_of_a_byte_level_tokenizer_has_bytes() -> None:
    tokenizer = byte_level_tokenizer()
    assert all(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
    assert {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)} >= {bytes([b]) for b in range(256)}


def test_an_added_token_stands_for_itself() -> None:
    """It is not written in the byte alphabet: its space is a space."""
    tokenizer = byte_level_tokenizer()
    (token_id,) = tokenizer.encode("<tool call>")
    assert tokenizer.token_bytes(token_id) == b"<tool call>"
    assert tokenizer.decode([token_id]) == "<tool call>"


@BOTH
def test_special_tokens_are_skipped_or_shown(build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    token_ids = [*tokenizer.encode("the fox"), *tokenizer.encode("<|end|>")[:1]]
    assert tokenizer.decode(token_ids) == "the fox"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "the fox<|end|>"
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.token_bytes(1) == b"<|end|>"


@BOTH
def test_ids_beyond_the_vocabulary_give_no_text(build: Callable[[], Tokenizer]) -> None:
    """A model's vocabulary is often padded beyond the tokenizer's."""
    tokenizer = build()
    padding = tokenizer.vocab_size + 3
    assert not tokenizer.knows(padding)
    assert tokenizer.knows(tokenizer.vocab_size - 1)
    assert tokenizer.token_bytes(padding) == b""
    assert tokenizer.decode([padding, *tokenizer.encode("fox"), padding]) == "fox"


@BOTH
def test_other_threads_go_on_while_a_long_text_is_encoded(build: Callable[[], Tokenizer]) -> None:
    tokenizer = build()
    text = LINES[0] * 40_000
    assert longest_pause_of_threads(lambda: tokenizer.encode(text)) < 0.5


def test_special_tokens_are_added_when_asked_for() -> None:
    fast = byte_level_tokenizer()._fast
    fast.post_processor = processors.TemplateProcessing(
        single="<|begin|> $0", special_tokens=[("<|begin|>", 0)]
    )
    tokenizer = wrap(fast)
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [0, *plain]


def test_a_limit_left_in_the_tokenizer_file_does_not_cut_prompts() -> None:
    fast = byte_level_tokenizer()._fast
    fast.enable_truncation(max_length=4)
    fast.enable_padding(length=100)
    assert wrap(fast).encode(LINES[0]) == byte_level_tokenizer().encode(LINES[0])


def test_a_saved_tokenizer_loads_with_its_names_and_template(tmp_path: Path) -> None:
    saved = byte_level_tokenizer()._hf
    saved.chat_template = "{{ messages }}"
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_tokens_map == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(tokenizer.encode(LINES[2])) == LINES[2]


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", None])
def test_it_is_the_tokenizer_that_transformers_would_choose(tmp_path: Path, name: str | None) -> None:
    byte_level_tokenizer()._hf.save_pretrained(tmp_path)
    make_llama(tmp_path / "base")
    (tmp_path / "base" / "config.json").rename(tmp_path / "config.json")  # they look for the kind of model
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["tokenizer_class"]
    file.write_text(json.dumps(config if name is None else config | {"tokenizer_class": name}))
    ours, theirs = Tokenizer.from_pretrained(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours._hf) is type(theirs)
    for line in LINES:
        assert ours.encode(line) == theirs.encode(line)
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_the_usual_kind_is_loaded_without_torch(tmp_path: Path) -> None:
    byte_level_tokenizer()._hf.save_pretrained(tmp_path)
    code = (
        "import sys; from engine.tokenizer import Tokenizer; Tokenizer.from_pretrained(sys.argv[1]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.chat_template is None
    tokenizer._hf.chat_template = {"tool_use": "b", "default": "a"}
    assert tokenizer.chat_template == "a"


def test_a_tokenizer_without_decoder_works() -> None:
    fast = FastTokenizer(
        models.WordLevel({"<|begin|>": 0, "<|end|>": 1, "red": 2, "fox": 3}, unk_token="<|end|>")
    )
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = wrap(fast)
    assert tokenizer.encode("red fox") == [2, 3]
    assert tokenizer.decode([2, 3]) == "red fox"
    assert tokenizer.token_bytes(3) == b"fox"
