"""An adapter checked: every tensor bound to a module of the model, as views of bytes that are on their way.

All that names and shapes can tell is checked before the tensors' bytes are read. Their values are checked
where they are cast, when the image is packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from engine.adapters.binding import BoundModule, bind, check_target_modules
from engine.adapters.files import WEIGHTS_FILE
from engine.adapters.peft_config import PeftConfig, parse_peft_config
from engine.adapters.reader import FileReader, LargeRead
from engine.adapters.safetensors_header import TensorEntry, read_header
from engine.adapters.source import AdapterFiles
from engine.dtypes import STORED
from engine.errors import AdapterRefused
from engine.shape import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class AdapterCheckpoint:
    name: str
    modules: tuple[BoundModule, ...]  # by layer and projection
    num_tensors: int  # in the file, all of them bound
    chat_template: str | None
    warnings: tuple[str, ...]
    weights: LargeRead
    _reader: FileReader
    _settings: str  # all else that changes an answer

    def __enter__(self) -> AdapterCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.weights.close()

    @property
    def digest(self) -> str:
        """The adapter's identity. Waits for all weights; raises SourceChanged if they are not as stated."""
        sha256 = self.weights.sha256()
        self._reader.verify(WEIGHTS_FILE, sha256)
        return hashlib.sha256(f"{self._settings}\n{sha256}".encode()).hexdigest()

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A view of `weights`, or a copy where that is not aligned. Waits until its bytes are there."""
        self.weights.wait(entry.stop)
        dtype = STORED[entry.dtype]
        content = torch.frombuffer(self.weights.buffer, dtype=torch.uint8)[entry.start : entry.stop]
        if entry.start % dtype.itemsize:
            content = content.clone()
        return content.view(dtype).view(entry.shape)


def start_checkpoint(
    files: AdapterFiles,
    shape: ModelShape,
    max_rank: int,
    check_size: Callable[[Sequence[BoundModule]], None] = lambda modules: None,
) -> AdapterCheckpoint:
    """Check all but the weights' values, and start to read these. The checkpoint is to be closed.

    Raises AdapterRefused, its `param` naming the config field or the tensor, or what `check_size` raises.
    """
    config = parse_peft_config(files.config)
    _refuse_added_tokens(files.tokenizer.added_tokens, shape.vocab_size)
    entries = read_header(files.reader)
    modules = bind(entries, config, shape, max_rank)
    check_size(modules)
    return AdapterCheckpoint(
        name=files.reader.listing.name,
        modules=tuple(modules),
        num_tensors=len(entries),
        chat_template=files.tokenizer.chat_template,
        warnings=(*config.warnings, *check_target_modules(config, modules)),
        weights=files.reader.start_read(WEIGHTS_FILE),
        _reader=files.reader,
        _settings=_settings(config, files.tokenizer.chat_template),
    )


def _refuse_added_tokens(added_tokens: dict[str, int], vocab_size: int) -> None:
    new = [token for token, token_id in added_tokens.items() if token_id >= vocab_size]
    if new:
        raise AdapterRefused(
            f"its tokenizer adds {len(new)} tokens to the base model's {vocab_size}, "
            f"among them {new[0][:80]!r}; added tokens are not supported",
            param="added_tokens",
        )


def _settings(config: PeftConfig, chat_template: str | None) -> str:
    # order matters in the patterns: the first match wins
    return json.dumps(
        [
            config.r,
            config.lora_alpha,
            config.use_rslora,
            list(config.rank_pattern.values.items()),
            list(config.alpha_pattern.values.items()),
            chat_template,
        ]
    )
