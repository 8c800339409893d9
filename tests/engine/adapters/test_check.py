from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.adapters.check import check_adapter
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from tests.engine.adapters.adapter_dirs import BASE_T, CONFIG, write_adapter


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": BASE_T.num_layers,
        "hidden_size": BASE_T.hidden_size,
        "intermediate_size": BASE_T.intermediate_size,
        "num_attention_heads": BASE_T.num_heads,
        "num_key_value_heads": BASE_T.num_kv_heads,
        "head_dim": BASE_T.head_dim,
        "vocab_size": BASE_T.vocab_size,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "model")


def test_a_servable_adapter_gets_its_load_report(model: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql", config=CONFIG | {"target_modules": ["q_proj", "v_proj", "o_proj"]})
    report = check_adapter(EngineConfig(model=model), str(path))
    assert len(report.pop("digest")) == 64
    num_bytes = 2 * 8 * ((64 + 64) + (64 + 32)) * 4
    (warning,) = report.pop("warnings")
    assert "o_proj" in warning
    assert report == {
        "status": "ok",
        "adapter": "sql",
        "rank": 8,
        "bytes": num_bytes,
        "pages": 2,
        "bound": 8,
        "present": 8,
        "modules": [
            {"name": f"model.layers.{layer}.self_attn.{projection}", "rank": 8, "scale": 2.0}
            for layer in (0, 1)
            for projection in ("q_proj", "v_proj")
        ],
        "chat_template": "base",
    }
    json.dumps(report)


def test_the_report_counts_bytes_in_the_configured_dtype(model: str, tmp_path: Path) -> None:
    """FR-19."""
    path = str(write_adapter(tmp_path / "sql"))
    wide = check_adapter(EngineConfig(model=model), path)
    for config in (EngineConfig(model=model, dtype="bfloat16"), EngineConfig(model=model, device="cuda")):
        assert check_adapter(config, path)["bytes"] * 2 == wide["bytes"]


def test_a_refusal_is_the_error_that_names_the_field(model: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql", config=CONFIG | {"use_dora": True})
    report = check_adapter(EngineConfig(model=model), str(path))
    assert report["status"] == "refused"
    assert report["error"]["param"] == "use_dora"
    assert report["error"]["type"] == "invalid_request_error"
    assert set(report["error"]) == {"message", "type", "param", "code"}


def test_an_absent_adapter_is_refused_too(model: str, tmp_path: Path) -> None:
    report = check_adapter(EngineConfig(model=model), str(tmp_path / "absent"))
    assert report["status"] == "refused"
    assert report["error"]["code"] == "model_not_found"


def test_a_bad_base_model_is_not_the_adapters_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        check_adapter(EngineConfig(model=str(tmp_path / "absent")), str(tmp_path))
