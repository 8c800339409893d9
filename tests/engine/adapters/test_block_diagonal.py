"""Adapters trained block-diagonally (BD-LoRA) hold smaller tensors: refused, also if the config is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peft import BdLoraConfig

from engine.errors import AdapterRefused
from tests.engine.adapters.adapter_dirs import load
from tests.tiny import make_adapter, make_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("bd")
    blocks = BdLoraConfig(target_modules_bd_a=["o_proj"], target_modules_bd_b=["q_proj"], nblocks=2)
    return make_adapter(
        make_llama(tmp_path / "base"),
        tmp_path / "adapter",
        rank=8,
        targets=["q_proj", "o_proj"],
        seed=0,
        use_bdlora=blocks,
    )


def test_the_config_names_it(path: Path) -> None:
    with pytest.raises(AdapterRefused, match="BD-LoRA") as caught:
        load(path)
    assert caught.value.param == "use_bdlora"


def test_the_tensors_show_it(path: Path) -> None:
    file = path / "adapter_config.json"
    config = json.loads(file.read_bytes())
    file.write_text(json.dumps({**config, "use_bdlora": None}))
    with pytest.raises(AdapterRefused) as caught:
        load(path)
    assert caught.value.param is not None
    assert ".lora_" in caught.value.param
