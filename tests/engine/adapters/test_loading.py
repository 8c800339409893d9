from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters.host_memory import HostArena
from engine.adapters.loading import load_image
from engine.adapters.reader import FileReader
from engine.errors import AdapterRefused, Unavailable
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    FORMAT,
    PAGE_ELEMS,
    load,
    lora_tensors,
    tensor_name,
    unpack,
    write_adapter,
    write_sums,
)


class Writer:
    """Replaces the adapter whenever a read of it has begun."""

    def __init__(self, path: Path, times: int) -> None:
        self.path = path
        self.times = times
        self.factor = 1

    def __call__(self) -> None:
        if self.times:
            self.times -= 1
            self.factor += 1
            write_adapter(self.path, {name: t * self.factor for name, t in lora_tensors().items()})


def test_an_adapter_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    """FR-22, FR-63."""
    path = write_adapter(tmp_path / "a")
    image = load_image(str(path), FORMAT, Writer(path, times=1))
    want = lora_tensors()[tensor_name(0, "q_proj", "A")] * 2
    assert torch.equal(unpack(image, BASE_T, 0, "q_proj")["A"], want)


def test_an_adapter_that_never_rests_is_a_503(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    with pytest.raises(Unavailable) as caught:
        load_image(str(path), FORMAT, Writer(path, times=100))
    assert caught.value.retry_after_s is not None


@pytest.mark.gpu
def test_an_image_for_a_device_is_in_pinned_memory(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    arena = HostArena(FORMAT.page_elems, FORMAT.dtype, is_pinned=True)
    image = load_image(str(path), replace(FORMAT, arena=arena))
    assert all(page.is_pinned() for page in image.pages)


@pytest.fixture(scope="module")
def base_model() -> Any:
    config = LlamaConfig(
        hidden_size=BASE_T.hidden_size,
        intermediate_size=BASE_T.intermediate_size,
        num_hidden_layers=BASE_T.num_layers,
        num_attention_heads=BASE_T.num_heads,
        num_key_value_heads=BASE_T.num_kv_heads,
        vocab_size=BASE_T.vocab_size,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 3}},
        {"target_modules": r".*\.1\..*\.(up|gate)_proj", "use_rslora": True},
        {"target_modules": ["k_proj"], "layers_to_transform": [1], "alpha_pattern": {"k_proj": 5}},
        {"target_modules": ["v_proj"], "init_lora_weights": "gaussian"},
    ],
)
def test_what_peft_saves_is_loaded_whole(options: dict[str, Any], base_model: Any, tmp_path: Path) -> None:
    """FR-01, FR-02, FR-10: every module that PEFT adapted, with its rank and scale."""
    model = get_peft_model(copy.deepcopy(base_model), LoraConfig(r=4, lora_alpha=8, **options))
    model.save_pretrained(tmp_path)
    report = load(tmp_path).report
    adapted = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert adapted
    assert {m["name"]: (m["rank"], m["scale"]) for m in report["modules"]} == adapted
    assert report["warnings"] == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ],
)
def test_what_peft_saves_beyond_plain_lora_is_refused(
    options: dict[str, Any], param: str, base_model: Any, tmp_path: Path
) -> None:
    """FR-06, FR-12, FR-14."""
    config = LoraConfig(r=4, target_modules=["q_proj"], **options)
    get_peft_model(copy.deepcopy(base_model), config).save_pretrained(tmp_path)
    with pytest.raises(AdapterRefused) as caught:
        load(tmp_path)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("limit", "param"),
    [({"max_pool_pages": 1}, "pool_bytes"), ({"max_host_bytes": 2 * 4 * PAGE_ELEMS - 1}, "host_cache_bytes")],
)
def test_an_image_that_can_never_fit_is_refused_before_its_bytes_are_read(
    limit: dict[str, Any], param: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-37: with both numbers."""
    path = write_adapter(tmp_path / "a")
    image = load(path)
    assert (image.num_pages, image.nbytes) == (2, 2 * 4 * PAGE_ELEMS)
    fitting: dict[str, Any] = {"max_pool_pages": image.num_pages, "max_host_bytes": image.nbytes}
    assert load_image(str(path), replace(FORMAT, **fitting)).digest == image.digest
    monkeypatch.delattr(FileReader, "start_read")
    with pytest.raises(AdapterRefused) as caught:
        load_image(str(path), replace(FORMAT, **limit))
    assert caught.value.param == param
    assert str(image.num_pages if param == "pool_bytes" else image.nbytes) in caught.value.message
    (number,) = limit.values()
    assert str(number) in caught.value.message


def test_an_adapter_with_the_right_sums_is_the_same_adapter(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    digest = load(path).digest
    write_sums(path)
    assert load(path).digest == digest


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_one_other_bit_than_the_sums_state_refuses_the_adapter(name: str, tmp_path: Path) -> None:
    """FR-63."""
    path = write_adapter(tmp_path / "a")
    write_sums(path)
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(AdapterRefused) as caught:
        load(path)
    assert caught.value.param == name
    assert "SHA-256" in caught.value.message
