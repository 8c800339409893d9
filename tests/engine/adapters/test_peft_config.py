from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig

from engine.adapters.peft_config import PeftConfig, parse_peft_config
from engine.errors import AdapterRefused

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"


def parse(**fields: Any) -> PeftConfig:
    return parse_peft_config(json.dumps({"peft_type": "LORA", **fields}).encode())


def refusal(**fields: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        parse(**fields)
    return caught.value


def test_absent_fields_take_pefts_defaults() -> None:
    """FR-13, FR-16."""
    config, peft = parse(), LoraConfig()
    assert (config.r, config.lora_alpha, config.use_rslora) == (peft.r, peft.lora_alpha, peft.use_rslora)
    assert config.rank(Q) == 8
    assert config.scale(Q) == 1.0
    assert config.warnings == ()


def test_what_peft_writes_with_all_its_fields_loads(tmp_path: Any) -> None:
    """FR-13: every field of the installed version, at its default."""
    LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(
        tmp_path
    )
    config = parse_peft_config((tmp_path / "adapter_config.json").read_bytes())
    assert config.scale(Q) == 2.0
    assert config.warnings == ()


def test_scale_divides_by_the_rank_or_by_its_root() -> None:
    """FR-01."""
    assert parse(r=64, lora_alpha=16).scale(Q) == 0.25
    assert parse(r=64, lora_alpha=16, use_rslora=None).scale(Q) == 0.25
    assert parse(r=64, lora_alpha=16, use_rslora=True).scale(Q) == 2.0
    assert parse(r=8, lora_alpha=16, use_rslora=True, rank_pattern={"q_proj": 2}).scale(Q) == 16 / math.sqrt(
        2
    )


def test_patterns_give_modules_their_own_rank_and_alpha() -> None:
    """FR-10."""
    config = parse(r=8, lora_alpha=16, rank_pattern={"q_proj": 4}, alpha_pattern={Q: 32})
    assert (config.rank(Q), config.rank(V)) == (4, 8)
    assert (config.scale(Q), config.scale(V)) == (8.0, 2.0)
    assert config.scale("model.layers.1.self_attn.q_proj") == 4.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True), ("lora_bias", True), ("bias", "all"), ("bias", "lora_only"), ("bias", None),
        ("use_qalora", True), ("trainable_token_indices", [1]), ("layer_replication", [[0, 4], [2, 5]]),
        ("megatron_config", {"tp": 2}), ("target_parameters", ["w"]), ("alora_invocation_tokens", [1]),
        ("use_bdlora", {"nblocks": 2}), ("arrow_config", {"top_k": 3}), ("kasa_config", {"beta": 1}),
        ("corda_config", {"x": 1}), ("lora_ga_config", {"x": 1}), ("future_scale_mode", "cubic"),
        ("future_factor", 0), ("future_flag", True),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"), ("init_lora_weights", "mica"), ("init_lora_weights", None),
        ("init_lora_weights", 1),
        ("peft_type", "LOHA"), ("peft_type", None), ("peft_type", ["LORA"]),
        ("r", 0), ("r", -1), ("r", "8"), ("r", 8.0), ("r", True), ("r", None),
        ("lora_alpha", 0), ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", math.nan),
        ("lora_alpha", math.inf), ("lora_alpha", 10**400), ("lora_alpha", False),
        ("use_rslora", "false"), ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]), ("rank_pattern", {"(a+)+$": 4}), ("alpha_pattern", {"(a|b": 4}),
        ("target_modules", 3), ("target_modules", [3]), ("modules_to_save", "lm_head"),
    ],
)  # fmt: skip
def test_what_changes_the_maths_is_refused_by_name(field: str, value: Any) -> None:
    """FR-12, FR-13, FR-14."""
    error = refusal(**{field: value})
    assert error.param == field
    assert field in error.message


@pytest.mark.parametrize("name", ["x" * 100_000, "\ud800", "a\nlog line"])
def test_a_tenants_names_fit_into_answers_and_logs(name: str) -> None:
    """JSON can spell what UTF-8 cannot, and a file's worth of it."""
    messages = []
    for fields in ({name: 1}, {"rank_pattern": {name: 0}}, {"alpha_pattern": {name: "1"}}):
        error = refusal(**fields)
        messages += [error.message, error.param or ""]
    config = parse(modules_to_save=[name], target_modules=[name])
    messages += [*config.modules_to_save, *(config.target_modules or ())]
    for message in messages:
        assert len(message) < 300
        assert message.isprintable()


def test_a_rank_of_many_digits_is_refused_in_few() -> None:
    assert len(refusal(r=10**4000).message) < 200
    assert len(refusal(rank_pattern={"q_proj": 10**4000}).message) < 200


def test_a_pattern_of_wrong_values_is_refused_with_its_key() -> None:
    assert refusal(rank_pattern={"q_proj": 4.5}).param == "rank_pattern.q_proj"
    assert refusal(alpha_pattern={"q_proj": "4"}).param == "alpha_pattern.q_proj"


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_is_off_loads(value: Any) -> None:
    """FR-13."""
    parse(future_scale_mode=value)


@pytest.mark.parametrize("value", [True, False, "gaussian", "Gaussian", "eva", "orthogonal"])
def test_a_harmless_start_of_training_loads(value: Any) -> None:
    """FR-14."""
    parse(init_lora_weights=value)


def test_fields_without_effect_on_a_finished_adapter_load() -> None:
    parse(
        lora_dropout=0.1,
        exclude_modules=["lm_head"],
        layers_to_transform=[0],
        layers_pattern="layers",
        eva_config={"rho": 2.0},
        loftq_config={"loftq_bits": 4},
        runtime_config={"ephemeral_gpu_offload": False},
        auto_mapping={"base_model_class": "LlamaForCausalLM"},
        base_model_name_or_path="/nowhere/at/all",
    )


def test_odd_values_without_effect_are_warnings() -> None:
    """FR-13."""
    (warning,) = parse(task_type="SEQ_CLS").warnings
    assert "task_type is 'SEQ_CLS'" in warning
    (warning,) = parse(fan_in_fan_out=True).warnings
    assert "fan_in_fan_out" in warning
    assert parse(task_type=None).warnings == ()


def test_a_regular_expression_of_targets_is_not_evaluated() -> None:
    """FR-02."""
    assert parse(target_modules="(a+)+$").target_modules is None
    assert parse(target_modules=["q_proj"]).target_modules == ("q_proj",)


@pytest.mark.parametrize(
    "content", [b'{"r": 8,', b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}"]
)
def test_a_config_that_is_no_json_object_is_refused_with_the_files_name(content: bytes) -> None:
    """FR-13."""
    with pytest.raises(AdapterRefused) as caught:
        parse_peft_config(content)
    assert caught.value.param == "adapter_config.json"
    assert "adapter_config.json" in caught.value.message


def test_a_refusal_does_not_repeat_a_long_value() -> None:
    assert len(refusal(future="x" * 500_000).message) < 200
    assert len(refusal(rank_pattern={"x" * 500_000: 4}).message) < 300
