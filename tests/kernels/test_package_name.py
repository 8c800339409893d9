"""Our package is called `kernels`, and so is a hub client that transformers uses when it finds it."""

from __future__ import annotations

from transformers.utils import is_kernels_available

import kernels


def test_transformers_does_not_take_ours_for_the_hub_client() -> None:
    """It asks the installed distribution's version, which would have to lie in the hub client's range."""
    assert not hasattr(kernels, "get_kernel")
    assert not is_kernels_available()


def test_transformers_loads_a_model_with_ours_importable() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert LlamaForCausalLM(config).config.vocab_size == 16
