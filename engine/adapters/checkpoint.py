"""An adapter read and checked: every tensor bound to a module of the model, as views of the file's bytes.

All that names and shapes can tell is checked before the tensors' bytes are read. Their values are checked
where they are cast, when the image is packed.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from engine.adapters.binding import BoundModule, bind, check_target_modules
from engine.adapters.files import WEIGHTS_FILE
from engine.adapters.peft_config import PeftConfig, parse_peft_config
from engine.adapters.safetensors_header import TensorEntry, read_header
from engine.adapters.source import AdapterFiles
from engine.errors import AdapterRefused
from engine.shape import ModelShape

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class AdapterCheckpoint:
    name: str
    digest: str  # of all that changes an answer: weights, scales, chat template
    modules: tuple[BoundModule, ...]  # by layer and projection
    num_tensors: int  # in the file, all of them bound
    chat_template: str | None
    warnings: tuple[str, ...]
    weights: bytearray

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """A view of `weights`, or a copy where that is not aligned."""
        dtype = _DTYPES[entry.dtype]
        content = torch.frombuffer(self.weights, dtype=torch.uint8)[entry.start : entry.stop]
        if entry.start % dtype.itemsize:
            content = content.clone()
        return content.view(dtype).view(entry.shape)


def load_checkpoint(files: AdapterFiles, shape: ModelShape, max_rank: int) -> AdapterCheckpoint:
    """Raises AdapterRefused, its `param` naming the config field or the tensor."""
    config = parse_peft_config(files.config)
    _refuse_added_tokens(files.tokenizer.added_tokens, shape.vocab_size)
    head, entries = read_header(files.reader)
    modules = bind(entries, config, shape, max_rank)
    weights = files.reader.read_all(WEIGHTS_FILE, head)
    return AdapterCheckpoint(
        name=files.reader.listing.name,
        digest=_digest(config, files.tokenizer.chat_template, weights),
        modules=tuple(modules),
        num_tensors=len(entries),
        chat_template=files.tokenizer.chat_template,
        warnings=(*config.warnings, *check_target_modules(config, modules)),
        weights=weights,
    )


def _refuse_added_tokens(added_tokens: dict[str, int], vocab_size: int) -> None:
    new = [token for token, token_id in added_tokens.items() if token_id >= vocab_size]
    if new:
        raise AdapterRefused(
            f"its tokenizer adds {len(new)} tokens to the base model's {vocab_size}, "
            f"among them {new[0][:80]!r}; added tokens are not supported",
            param="added_tokens",
        )


def _digest(config: PeftConfig, chat_template: str | None, weights: bytearray) -> str:
    # order matters in the patterns: the first match wins
    relevant = [
        config.r,
        config.lora_alpha,
        config.use_rslora,
        list(config.rank_pattern.values.items()),
        list(config.alpha_pattern.values.items()),
        chat_template,
    ]
    digest = hashlib.sha256(json.dumps(relevant).encode() + b"\n")
    digest.update(weights)
    return digest.hexdigest()
