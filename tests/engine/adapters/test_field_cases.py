"""The field cases about adapter files, as their JSON states them: what loads, how strong, what is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import AdapterRefused
from engine.shape import PROJECTIONS
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    DTYPES,
    fill,
    load,
    lora_tensors,
    unpack,
    write_adapter,
)

CASES = Path(__file__).parent / "cases"

# where a case leaves the choice to the server
OUR_CHOICE = {
    ("FR-04", "decoder nested under language_model"): "ok",
    ("FR-04", "no base_model prefix"): "ok",
    ("FR-06", "full matrices"): "refused",
    # LoRA on lm_head is refused for now, so nothing needs the copy of the base matrix beside it
    ("FR-08", "tied head with base copy"): "refused",
    ("FR-12", "dora"): "refused",
    ("FR-14", "lora_bias"): "refused",
    ("FR-14", "bias lora_only"): "refused",
    ("FR-16", "no lora_alpha"): "ok",
    ("FR-42", "pre-fused"): "refused",
}

# config field or part of a tensor's name that a refusal must point at
PARAMS = {
    ("FR-06", "full matrices"): "modules_to_save",
    ("FR-08", "tied head with base copy"): "lm_head",
    ("FR-08", "copy differs from base"): "lm_head.base_layer",
    ("FR-12", "dora"): "use_dora",
    ("FR-12", "flag without magnitudes"): "use_dora",
    ("FR-12", "magnitudes without flag"): "lora_magnitude_vector",
    ("FR-13", "unknown field with a value"): "future_scale_mode",
    ("FR-13", "missing peft_type"): "peft_type",
    ("FR-13", "other method"): "peft_type",
    ("FR-13", "not json"): "adapter_config.json",
    ("FR-14", "pissa, not converted"): "init_lora_weights",
    ("FR-14", "olora with step count form"): "init_lora_weights",
    ("FR-14", "lora_bias"): "lora_bias",
    ("FR-14", "bias lora_only"): "bias",
    ("FR-16", "r disagrees"): "lora_A.weight",
    ("FR-16", "unpaired"): "layers.1.self_attn.q_proj.lora_A.weight",
    ("FR-16", "nan"): "layers.0.self_attn.q_proj.lora_B.weight",
    ("FR-20", "hidden differs"): "layers.0.self_attn.q_proj.lora_A.weight",
    ("FR-20", "layer out of range"): "layers.5",
    ("FR-20", "module unknown"): "Wqkv",
    ("FR-20", "transposed"): "lora_A",
    ("FR-42", "pre-fused"): "qkv_proj",
}


def read_variants() -> list[Any]:
    cases = [json.loads(path.read_text()) for path in sorted(CASES.glob("*.json"))]
    return [
        pytest.param(case["id"], variant, id=f"{case['id']}: {variant['name']}")
        for case in cases
        for variant in case["variants"]
        if "tensors" in variant and "limit 32" not in variant["expect"]
    ]


def write_case(path: Path, variant: dict[str, Any]) -> Path:
    tensors = {}
    for name, (dtype, shape, *notes) in variant["tensors"].items():
        tensors[name] = fill(name, shape, DTYPES[dtype])
        if notes == ["one NaN"]:
            tensors[name].view(-1)[-1] = torch.nan
    return write_adapter(path, tensors, variant["adapter_config"])


@pytest.mark.parametrize(("case", "variant"), read_variants())
def test_a_case_loads_or_is_refused_as_it_states(case: str, variant: dict[str, Any], tmp_path: Path) -> None:
    """FR-01, 02, 04, 06, 08, 10, 12, 13, 14, 16, 19, 20, 42."""
    path = write_case(tmp_path / "a", variant)
    key = case, variant["name"]
    outcome = OUR_CHOICE.get(key) or variant["expect"]["load"].split()[0]
    started = time.monotonic()
    if outcome == "refused":
        with pytest.raises(AdapterRefused) as caught:
            load(path)
        assert caught.value.status == 400
        assert caught.value.param is not None
        assert PARAMS[key] in caught.value.param
        for part in variant["expect"].get("message_contains", ()):
            assert part in caught.value.message
    else:
        assert outcome == "ok"
        assert_loaded(path, variant)
    assert time.monotonic() - started < variant["expect"].get("load_seconds_max", 10)


def assert_loaded(path: Path, variant: dict[str, Any]) -> None:
    image = load(path)
    expect = variant["expect"]
    report = image.report
    assert report["bound"] == report["present"] == len(variant["tensors"])
    assert len(report["modules"]) == expect.get("modules", len(variant["tensors"]) // 2)
    for projection, scale in expect.get("scale", {}).items():
        scales = [m["scale"] for m in report["modules"] if m["name"].endswith(projection)]
        assert scales == [scale] * BASE_T.num_layers
        assert image.scales[:, PROJECTIONS.index(projection)].tolist() == scales
    assert [w for w in report["warnings"] if not w.startswith("task_type")] == []
    assert any("task_type" in w for w in report["warnings"]) == (expect.get("warning") == "task_type")
    assert_holds(image, variant)


def assert_holds(image: Any, variant: dict[str, Any]) -> None:
    """Every value of every tensor is where the tables say, and nothing else is adapted."""
    adapted = set()
    for name, (dtype, shape, *_) in variant["tensors"].items():
        *_, layer, _, projection, side, _ = name.split(".")
        adapted.add((int(layer), PROJECTIONS.index(projection)))
        want = fill(name, shape, DTYPES[dtype]).float()
        got = unpack(image, BASE_T, int(layer), projection)[side[-1]]
        assert torch.equal(got, want), name
    assert {tuple(index) for index in image.ranks.nonzero().tolist()} == adapted
    assert (image.tile_offsets[image.ranks == 0] == -1).all()


def test_the_rank_limit_counts_the_largest_real_rank(tmp_path: Path) -> None:
    """FR-10: `r` is 8, one module has rank 64."""
    case = json.loads((CASES / "FR-10.json").read_text())
    (variant,) = [v for v in case["variants"] if v["name"] == "rank above r"]
    path = write_case(tmp_path / "a", variant)
    with pytest.raises(AdapterRefused) as caught:
        load(path, max_rank=32)
    assert "64" in caught.value.message
    assert "32" in caught.value.message
    image = load(path, max_rank=64)
    assert image.rank == image.report["rank"] == 64
    assert {m["scale"] for m in image.report["modules"] if "q_proj" in m["name"]} == {0.25}


def test_a_missing_alpha_is_pefts_default_of_8(tmp_path: Path) -> None:
    """FR-16: neither r nor 2 r."""
    config = {"peft_type": "LORA", "r": 4}
    path = write_adapter(tmp_path / "a", lora_tensors(rank=4), config)
    assert {m["scale"] for m in load(path).report["modules"]} == {8 / 4}


def test_full_matrices_are_refused_with_their_names_and_bytes(tmp_path: Path) -> None:
    """FR-06: by the config field, and also where the config does not tell."""
    case = json.loads((CASES / "FR-06.json").read_text())
    (variant,) = case["variants"]
    path = write_case(tmp_path / "a", variant)
    for without_field in (False, True):
        if without_field:
            config = {k: v for k, v in variant["adapter_config"].items() if k != "modules_to_save"}
            (path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(AdapterRefused) as caught:
            load(path)
        for name in ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"):
            assert f"{name} (F32 [256, 64], 65536 bytes)" in caught.value.message
        assert "8 of 10 tensors bound" in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp32", "fp16", "mixed"])
def test_memory_is_counted_in_the_serving_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """FR-19: cast once at load; an fp32 file takes half of its size as bf16."""
    case = json.loads((CASES / "FR-19.json").read_text())
    (variant,) = [v for v in case["variants"] if v["name"] == name]
    image = load(write_case(tmp_path / "a", variant), dtype=dtype)
    num_elements = sum(shape[0] * shape[1] for _, shape, *_ in variant["tensors"].values())
    assert image.pages[0].dtype == dtype
    assert image.report["bytes"] == num_elements * dtype.itemsize
    for tensor, (on_disk, shape, *_) in variant["tensors"].items():
        *_, layer, _, projection, side, _ = tensor.split(".")
        want = fill(tensor, shape, DTYPES[on_disk]).to(dtype)
        assert torch.equal(unpack(image, BASE_T, int(layer), projection)[side[-1]], want)
