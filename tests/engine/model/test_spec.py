"""What is read from a model's directory, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.model.spec import RopeSpec, load_model_spec
from engine.shape import ModelShape

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_config(path: Path, **overrides: Any) -> str:
    (path / "config.json").write_text(json.dumps(CONFIG | overrides))
    return str(path)


def test_reads_sizes_and_tokens(tmp_path: Path) -> None:
    spec = load_model_spec(write_config(tmp_path))
    assert spec.path == str(tmp_path)
    assert spec.shape == ModelShape(
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=256,
    )
    assert spec.rope == RopeSpec(10000.0)
    assert spec.rms_norm_eps == 1e-5
    assert spec.tie_word_embeddings
    assert spec.max_position_embeddings == 512
    assert spec.bos_token_id == 1
    assert spec.eos_token_ids == (2,)


def test_head_size_need_not_divide_hidden_size(tmp_path: Path) -> None:
    spec = load_model_spec(write_config(tmp_path, head_dim=24))
    assert spec.shape.head_dim == 24
    assert spec.shape.q_size == 96


def test_eos_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    model = write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_model_spec(model).eos_token_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert load_model_spec(model).eos_token_ids == (2,)


def test_a_model_without_eos(tmp_path: Path) -> None:
    assert load_model_spec(write_config(tmp_path, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"type": "linear", "factor": 4.0}, RopeSpec(5e5, "linear", factor=4.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 128),
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], want: RopeSpec) -> None:
    model = write_config(tmp_path, rope_theta=5e5, rope_scaling=scaling)
    assert load_model_spec(model).rope == want


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "qwen3"}, "model_type"),
        ({"model_type": "nobody-knows"}, "model_type"),
    ],
)
def test_what_the_forward_pass_would_ignore_is_refused(
    tmp_path: Path, overrides: dict[str, Any], param: str
) -> None:
    model = write_config(tmp_path, **overrides)
    with pytest.raises(InvalidRequest) as error:
        load_model_spec(model)
    assert error.value.param == param


def test_a_quantised_base_is_refused_at_start(tmp_path: Path) -> None:
    """FR-44."""
    quantization = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(InvalidRequest) as error:
        load_model_spec(write_config(tmp_path, quantization_config=quantization))
    assert error.value.param == "quantization_config"


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "some/nested/model"])
def test_an_absent_directory_is_no_hub_id(model: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        load_model_spec(model)
    assert error.value.param == "model"


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as error:
        load_model_spec(str(tmp_path))
    assert error.value.param == "model"


def test_importing_the_spec_does_not_import_torch() -> None:
    code = "import sys, engine.model.spec; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
