from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from engine.adapters.binding import BoundModule, bind, check_target_modules
from engine.adapters.peft_config import PeftConfig, parse_peft_config
from engine.adapters.safetensors_header import TensorEntry
from engine.errors import AdapterRefused
from engine.shape import PROJECTIONS
from tests.engine.adapters.adapter_dirs import BASE_T, tensor_name


def config(**fields: Any) -> PeftConfig:
    return parse_peft_config(json.dumps({"peft_type": "LORA", **fields}).encode())


def pair(layer: int, projection: str, rank: int = 8, dtype: str = "F32") -> list[TensorEntry]:
    in_features, out_features = BASE_T.widths(PROJECTIONS.index(projection))
    return [
        TensorEntry(tensor_name(layer, projection, "A"), dtype, (rank, in_features), 0, 1),
        TensorEntry(tensor_name(layer, projection, "B"), dtype, (out_features, rank), 1, 2),
    ]


def renamed(entries: list[TensorEntry], old: str, new: str) -> list[TensorEntry]:
    return [TensorEntry(e.name.replace(old, new), e.dtype, e.shape, e.start, e.stop) for e in entries]


def bound(entries: list[TensorEntry], max_rank: int = 256, **fields: Any) -> list[BoundModule]:
    return bind(entries, config(**fields), BASE_T, max_rank)


def refusal(entries: list[TensorEntry], max_rank: int = 256, **fields: Any) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as caught:
        bound(entries, max_rank, **fields)
    return caught.value


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("layers", [[0], [1], [0, 1]])
def test_any_projection_of_any_layers_binds(projection: str, layers: list[int]) -> None:
    """FR-42: one projection alone is an adapter."""
    modules = bound([e for layer in layers for e in pair(layer, projection)])
    assert [(m.layer, PROJECTIONS[m.projection], m.rank) for m in modules] == [
        (n, projection, 8) for n in layers
    ]


@pytest.mark.parametrize("rank", [1, 2, 7, 16, 17, 64, 256])
def test_any_rank_up_to_the_limit_binds(rank: int) -> None:
    (module,) = bound(pair(0, "q_proj", rank), max_rank=rank, r=rank)
    assert module.rank == rank
    error = refusal(pair(0, "q_proj", rank + 1), max_rank=rank, r=rank + 1)
    assert str(rank + 1) in error.message
    assert str(rank) in error.message


PREFIX = "base_model.model.model."


@pytest.mark.parametrize(
    "prefix",
    [
        "model.", "base_model.model.", "", "base_model.model.model.language_model.",
        "base_model.model.language_model.model.", "model.language_model.",
    ],
)  # fmt: skip
def test_the_decoder_is_found_under_the_names_of_wrapper_models(prefix: str) -> None:
    """FR-04: a declared mapping applies and everything binds."""
    (module,) = bound(renamed(pair(1, "down_proj"), PREFIX, prefix))
    assert module.name == "model.layers.1.mlp.down_proj"


def test_patterns_are_matched_with_the_names_of_training() -> None:
    """FR-10: PEFT saw the module under the wrapper's name."""
    entries = renamed(pair(0, "q_proj", rank=4), PREFIX, "base_model.model.model.language_model.")
    (module,) = bound(entries, rank_pattern={"^model.language_model.layers.0.self_attn.q_proj": 4})
    assert module.rank == 4


def test_nothing_bound_shows_a_name_of_each_side() -> None:
    """FR-04."""
    entries = renamed(pair(0, "q_proj") + pair(1, "q_proj"), PREFIX, "transformer.")
    error = refusal(entries)
    assert "0 of 4 tensors bound" in error.message
    assert entries[0].name in error.message
    assert tensor_name(0, "q_proj", "A") in error.message


@pytest.mark.parametrize(
    ("name", "explanation"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "bias"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embed_tokens"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "fused"),
        ("base_model.model.model.layers.0.mlp.gate_up_proj.lora_A.weight", "fused"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "tensors like"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "tensors like"),
        ("base_model.model.model.layers.00.self_attn.k_proj.lora_A.weight", "tensors like"),
        ("base_model.model.model.visual.layers.0.self_attn.k_proj.lora_A.weight", "tensors like"),
        ("base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight ", "tensors like"),
    ],
)
def test_one_tensor_that_does_not_bind_refuses_the_adapter(name: str, explanation: str) -> None:
    """FR-06, FR-08, FR-12, FR-14, FR-42: bound == present, or nothing is served."""
    error = refusal([*pair(0, "q_proj"), TensorEntry(name, "F32", (8, 64), 2, 3)])
    assert error.param == name
    assert name in error.message
    assert "2 of 3 tensors bound" in error.message
    assert explanation in error.message


def test_a_refusal_lists_a_few_of_many_tensors() -> None:
    entries = [TensorEntry(f"x{index}", "F32", (1,), 0, 4) for index in range(1000)]
    assert "and 994 more" in refusal(entries).message


def test_a_file_without_tensors_is_refused() -> None:
    assert refusal([]).param == "adapter_model.safetensors"


def test_modules_to_save_without_their_tensors_is_refused() -> None:
    """FR-06: the config says that there was more to this model."""
    assert refusal(pair(0, "q_proj"), modules_to_save=["lm_head"]).param == "modules_to_save"


@pytest.mark.parametrize("side", [0, 1])
def test_half_a_pair_is_refused_with_its_name(side: int) -> None:
    """FR-16."""
    (entry,) = pair(0, "q_proj")[side : side + 1]
    error = refusal([entry, *pair(1, "q_proj")])
    assert error.param == entry.name
    assert f"no lora_{'BA'[side]}" in error.message


def test_two_tensors_for_one_module_are_refused() -> None:
    entries = pair(0, "q_proj") + renamed(pair(0, "q_proj"), PREFIX, "model.")
    error = refusal(entries)
    assert entries[0].name in error.message
    assert entries[2].name in error.message


@pytest.mark.parametrize("dtype", ["F64", "I8", "BOOL"])
def test_types_other_than_the_three_floats_are_refused(dtype: str) -> None:
    """FR-19."""
    error = refusal(pair(0, "q_proj", dtype=dtype))
    assert error.param == tensor_name(0, "q_proj", "A")
    assert dtype in error.message


@pytest.mark.parametrize(
    ("a", "b", "part"),
    [
        ((8, 80), (64, 8), "got [8, 80], want [8, 64]"),
        ((64, 8), (8, 64), "got [64, 8], want [8, 64]"),
        ((8, 64), (32, 8), "got [32, 8], want [64, 8]"),
        ((8, 64), (64, 4), "got [64, 4], want [64, 8]"),
        ((8,), (64, 8), "got [8], want [8, 64]"),
        ((8, 64, 1), (64, 8), "got [8, 64, 1], want [8, 64]"),
        ((0, 64), (64, 0), "rank 0, the config's r and rank_pattern say 8"),
        ((4, 64), (64, 4), "rank 4, the config's r and rank_pattern say 8"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_both(
    a: tuple[int, ...], b: tuple[int, ...], part: str
) -> None:
    """FR-16, FR-20."""
    lora_a, lora_b = pair(0, "q_proj")
    error = refusal([TensorEntry(lora_a.name, "F32", a, 0, 1), TensorEntry(lora_b.name, "F32", b, 1, 2)])
    assert part in error.message
    assert error.param is not None
    assert error.param in error.message


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    """FR-20."""
    entries = pair(0, "q_proj") + renamed(pair(0, "q_proj"), "layers.0", "layers.2")
    error = refusal(entries)
    assert error.param == entries[2].name
    assert "layer 2" in error.message
    assert "0 to 1" in error.message


def test_target_modules_that_disagree_with_the_tensors_are_warnings() -> None:
    """FR-02."""
    modules = bound(pair(0, "q_proj") + pair(0, "v_proj"))
    assert check_target_modules(config(target_modules=["q_proj", "v_proj"]), modules) == []
    assert check_target_modules(config(target_modules=["layers.0.self_attn.q_proj", "v_proj"]), modules) == []
    assert check_target_modules(config(target_modules="all-linear"), modules) == []
    assert check_target_modules(config(), modules) == []
    (unused,) = check_target_modules(config(target_modules=["q_proj", "v_proj", "o_proj"]), modules)
    assert "o_proj" in unused
    (unlisted,) = check_target_modules(config(target_modules=["q_proj"]), modules)
    assert "model.layers.0.self_attn.v_proj" in unlisted


def test_many_targets_take_no_time() -> None:
    """A config may hold a megabyte of them; they took a minute."""
    modules = bound([e for layer in (0, 1) for name in PROJECTIONS for e in pair(layer, name)]) * 60
    modules = [replace(module, layer=i // 7) for i, module in enumerate(modules)]
    targets = ["zz"] * 200_000
    began = time.monotonic()
    unused, unlisted = check_target_modules(config(target_modules=targets), modules)
    assert time.monotonic() - began < 5.0
    assert "199994 more" in unused
    assert "834 more" in unlisted
