"""What is read from a model's directory, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.model.spec import _DEFAULTS, RopeSpec, load_model_spec
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


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"head_dim": 24, "num_key_value_heads": None, "rms_norm_eps": 1e-6},
        {
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": [3, 4],
        },
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": {**LLAMA3, "rope_theta": 7.0}},
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if not k.startswith("original")}},
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"partial_rotary_factor": None},
    ],
)
@pytest.mark.parametrize("absent", [(), tuple(_DEFAULTS), ("num_key_value_heads", "rope_theta")])
def test_reads_what_transformers_reads(
    tmp_path: Path, overrides: dict[str, Any], absent: tuple[str, ...]
) -> None:
    from transformers import LlamaConfig

    config = {name: value for name, value in (CONFIG | overrides).items() if name not in absent}
    config = {name: value for name, value in config.items() if value is not None or name != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, theirs = load_model_spec(str(tmp_path)), LlamaConfig.from_pretrained(tmp_path)
    assert spec.shape == ModelShape(
        num_layers=theirs.num_hidden_layers,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=theirs.head_dim,
        vocab_size=theirs.vocab_size,
    )
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    assert spec.bos_token_id == theirs.bos_token_id
    eos = theirs.eos_token_id
    assert spec.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    rope = dict(theirs.rope_parameters)
    assert (spec.rope.theta, spec.rope.type) == (rope.pop("rope_theta"), rope.pop("rope_type"))
    rope.pop("type", None)
    assert {name: getattr(spec.rope, name) for name in rope} == rope


@pytest.mark.parametrize(
    ("overrides", "param"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "256"}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor"),
    ],
)
def test_a_field_that_is_no_such_thing_is_named(
    tmp_path: Path, overrides: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        load_model_spec(write_config(tmp_path, **overrides))
    assert error.value.param == param


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_is_no_configuration_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"config\.json") as error:
        load_model_spec(str(tmp_path))
    assert error.value.param == "model"


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


def test_reading_the_spec_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from engine.model.spec import load_model_spec; load_model_spec(sys.argv[1]); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code, write_config(tmp_path)], check=True)
