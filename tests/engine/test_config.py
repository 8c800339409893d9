from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine.config import EngineConfig

NUMBERS = [
    f.name
    for f in dataclasses.fields(EngineConfig)
    if f.name
    not in (
        "model",
        "device",
        "dtype",
        "prefix_cache",
        "debug",
        "fairness",
        "eviction_policy",
        "lora_sharding",
        "pinned_adapters",
        "prefetch",
        "disk_cache_dir",
        "rank_address",
    )
]
MAY_BE_ZERO = {"max_overtakes", "max_overtaken_s"}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_refused_by_name(name: str) -> None:
    fields: dict[str, Any] = {name: -1 if name in MAY_BE_ZERO else 0}
    with pytest.raises(ValueError, match=f"^{name} must"):
        EngineConfig("model", **fields)


@pytest.mark.parametrize("name", sorted(MAY_BE_ZERO))
def test_overtaking_may_be_forbidden(name: str) -> None:
    fields: dict[str, Any] = {name: 0}
    assert getattr(EngineConfig("model", **fields), name) == 0


@pytest.mark.parametrize("name", ["step_timeout_s", "heartbeat_timeout_s"])
def test_a_limit_that_an_idle_engine_would_pass_is_refused(name: str) -> None:
    fields: dict[str, Any] = {name: 1.0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1.5, got 1.0"):
        EngineConfig("model", **fields)


def test_an_engine_may_have_a_whole_gpu_but_no_more() -> None:
    assert EngineConfig("model", gpu_memory_fraction=1.0).gpu_memory_fraction == 1.0
    with pytest.raises(ValueError, match=r"gpu_memory_fraction must be above 0 and at most 1, got 1\.01"):
        EngineConfig("model", gpu_memory_fraction=1.01)


@pytest.mark.parametrize("name", ["device", "dtype"])
def test_an_unknown_choice_is_refused_with_those_there_are(name: str) -> None:
    fields: dict[str, Any] = {name: "tpu"}
    with pytest.raises(
        ValueError, match=rf"{name} must be one of .*'{getattr(EngineConfig('m'), name)}'.*'tpu'"
    ):
        EngineConfig("model", **fields)


def test_an_unknown_option_is_an_error() -> None:
    fields: dict[str, Any] = {"max_loras": 4}
    with pytest.raises(TypeError, match="max_loras"):
        EngineConfig("model", **fields)


def test_every_running_request_must_be_able_to_decode_in_one_step() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        EngineConfig("model", max_num_seqs=8, max_num_batched_tokens=7)
    EngineConfig("model", max_num_seqs=8, max_num_batched_tokens=8)


def test_it_is_not_mutated() -> None:
    config = EngineConfig("model")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 1  # type: ignore[misc]
