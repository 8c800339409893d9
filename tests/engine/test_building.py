from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import InvalidRequest
from tests.tiny import make_llama


@pytest.mark.parametrize(
    ("settings", "param"),
    [({"pool_bytes": 100}, "pool_bytes"), ({"max_model_len": 513}, "max_model_len")],
)
def test_what_cannot_be_built_names_the_option(tmp_path: Path, settings: dict[str, int], param: str) -> None:
    base = make_llama(tmp_path / "base")
    with pytest.raises(InvalidRequest) as caught:
        Engine(EngineConfig(model=str(base), **settings))  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Engine(EngineConfig(model=str(tmp_path), device="cuda"))
    assert caught.value.param == "device"


def test_small_models_get_pages_that_hold_an_adapter_tile(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", num_hidden_layers=1, num_key_value_heads=1)
    engine = Engine(EngineConfig(model=str(base), num_pages=8))
    # 1 layer x 2 x 16 tokens x 16 elements is a quarter of a tile of 16 x 128
    assert engine.core.geometry.page_tokens == 64
    engine.close()
