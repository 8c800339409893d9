"""Text to token ids and back: a thin wrapper over a Hugging Face fast tokenizer. Renders no chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.model.remote import fetch_small_files, is_remote

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # its names before and since transformers 5
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Tokenizer:
    def __init__(self, hf_tokenizer: Any) -> None:
        """`hf_tokenizer`: a transformers fast tokenizer."""
        self._hf = hf_tokenizer
        self._fast: FastTokenizer = hf_tokenizer.backend_tokenizer
        # a tokenizer.json may carry the limits that it was trained with
        self._fast.no_truncation()
        self._fast.no_padding()
        added = self._fast.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoders = _decoder_types(self._fast)

    @classmethod
    def from_pretrained(cls, model: str) -> Tokenizer:
        """`model`: directory, hub id or s3://bucket/prefix."""
        return cls(_load(fetch_small_files(model) if is_remote(model) else Path(model)))

    @property
    def vocab_size(self) -> int:
        """Tokens it knows; a model may have more logits."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own; which tokens end a generation is the model's to say."""
        token_id: int | None = self._hf.eos_token_id
        return token_id

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None."""
        template: str | dict[str, str] | None = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as chat templates name them."""
        return {name: str(token) for name, token in self._hf.special_tokens_map.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # of a batch, even of one: to encode a single text it holds the GIL, for seconds if that is long
        (encoding,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids that it does not know give no text."""
        return self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def knows(self, token_id: int) -> bool:
        return self._fast.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; they may be part of a character."""
        if token_id in self._added:
            content: str = self._added[token_id]
            return content.encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if "ByteFallback" in self._decoders and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._decoders & {"Metaspace", "Replace"}:
            token = token.replace("\u2581", " ")
        return token.encode()


def _load(model: Path) -> Any:
    """What AutoTokenizer gives. To find out the class it imports PyTorch: 250 MB and seconds in each process.

    So it is not asked where the answer is known, as for Llama 3; Llama 2's has a class of its own.
    """
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) if file.is_file() else {}
    is_plain = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    if is_plain and (model / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model))


def _decoder_types(fast: FastTokenizer) -> frozenset[str]:
    if fast.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(fast.decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
