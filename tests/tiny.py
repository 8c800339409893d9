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
