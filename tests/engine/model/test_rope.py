"""Rotary tables equal those of transformers for each kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.model.rope import rotary_table
from engine.model.spec import RopeSpec

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, **LLAMA3},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_equals_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters=rope,
    )
    want_cos, want_sin = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(1024)[None])
    spec = RopeSpec(
        rope["rope_theta"],
        rope["rope_type"],
        *(rope.get(k, 0) for k in ("factor", *LLAMA3)),
    )
    cos, sin = rotary_table(spec, head_dim, 1024)
    # an angle of 1000 rad has an ulp of 6e-5
    torch.testing.assert_close(cos, want_cos[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, want_sin[0], atol=1e-4, rtol=0)
