"""Tiny real models for tests: random Llamas with a byte-level tokenizer, and random adapters made by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_llama(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Base T of the field cases unless overridden: 2 layers, 4 heads, 2 KV heads, vocabulary of 256 bytes."""
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        # wide enough for clear gaps between the best two tokens
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings | overrides))
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, no special tokens: any output is text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE)


def make_adapter(base: Path, path: Path, *, rank: int, targets: list[str], seed: int, **config: Any) -> Path:
    """What training would leave behind, with a B that is not zero."""
    model = LlamaForCausalLM.from_pretrained(base)
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "task_type": "CAUSAL_LM"}
    peft_model = get_peft_model(model, LoraConfig(**settings | config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.normal_(0.0, 0.3 / parameter.shape[1] ** 0.5, generator=generator)
    peft_model.save_pretrained(path)
    return path


def make_parrot(path: Path, cycle: bytes, **overrides: Any) -> Path:
    """A Llama whose greedy output after any byte of `cycle` is the next one, for ever; no byte twice.

    Hidden states are one-hot, attention and MLP add nothing, and the head maps each byte to its successor.
    """
    make_llama(path, hidden_size=256, num_hidden_layers=1, **overrides)
    model = LlamaForCausalLM.from_pretrained(path)
    byte_at = byte_tokenizer().convert_tokens_to_ids
    alphabet = {byte: byte_at(char) for byte, char in _byte_chars().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(256))
        for byte, successor in zip(cycle, cycle[1:] + cycle[:1], strict=True):
            model.lm_head.weight[alphabet[successor], alphabet[byte]] = 1.0
    model.save_pretrained(path)
    return path


def _byte_chars() -> dict[int, str]:
    tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # every byte that UTF-8 uses, by way of text that holds it
    text = "".join(map(chr, [*range(0x100), *range(0x800, 0xD800, 0x40), *range(0x1F600, 0x1F640)]))
    chars = "".join(piece for piece, _ in tokenizer.pre_tokenize_str(text))
    return dict(zip(text.encode(), chars, strict=True))
