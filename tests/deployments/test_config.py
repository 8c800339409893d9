"""The application's arguments are checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import AppArgs

EXAMPLE = Path(__file__).parents[2] / "deployments" / "serve_config.example.yaml"


def test_a_model_is_enough() -> None:
    args = AppArgs(model="/models/tiny")
    assert args.engine_config().model == "/models/tiny"
    assert args.engine_config().device == "cpu"
    assert args.api_key_digests == []


def test_engine_options_reach_the_engine() -> None:
    args = AppArgs(
        model="m", device="cuda", tensor_parallel_size=2, engine={"max_num_seqs": 4, "pool_bytes": 1 << 20}
    )
    config = args.engine_config()
    assert config.tensor_parallel_size == 2
    assert (config.device, config.max_num_seqs, config.pool_bytes) == ("cuda", 4, 1 << 20)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"modle": "m"}, "modle"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"device": "tpu"}, "device"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"engine": {"tensor_parallel_size": 2}}, "'tensor_parallel_size'"),
        ({"metrics_port": 70000}, "metrics_port"),
        ({"engine": {"max_seqs": 4}}, "max_seqs"),
        ({"engine": {"model": "other"}}, "'model'"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs must be positive"),
        ({"engine": {"max_num_seqs": "many"}}, "max_num_seqs"),
        ({"router": {"slak": 3}}, "slak"),
        ({"api_key_digests": ["my-secret-key"]}, "no SHA-256 digest"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs(**{"model": "m", **values})
    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "a b", "", "x" * 129, "_base"])
def test_a_configured_adapter_has_a_name_that_requests_can_have(name: str) -> None:
    """FR-30, FR-72: it would be in every label, and reachable by nobody."""
    with pytest.raises(ValidationError, match="lora_modules"):
        AppArgs(model="m", lora_modules={"good": "/a", name: "/b"})
    assert AppArgs(model="m", lora_modules={"org/good": "/a"}).lora_modules == {"org/good": "/a"}


@pytest.mark.parametrize(
    "values", [{"model": "/models/sql"}, {"model": "m", "served_model_name": ["m", "sql"]}]
)
def test_no_configured_adapter_is_named_as_the_base_model(values: dict[str, Any]) -> None:
    """FR-47: the base model would answer its requests."""
    with pytest.raises(ValidationError, match="lora_modules: 'sql' is the base model"):
        AppArgs(**values, lora_modules={"sql": "/adapters/sql"})


def test_served_names_are_one_or_several_and_by_default_no_path() -> None:
    """FR-30: a server's directory is not shown to clients."""
    assert AppArgs(model="/models/tiny/").model_names() == ("tiny",)
    assert AppArgs(model="org/tiny").model_names() == ("tiny",)
    assert AppArgs.model_validate({"model": "m", "served_model_name": "a"}).model_names() == ("a",)
    assert AppArgs(model="m", served_model_name=["a", "b"]).model_names() == ("a", "b")


def test_runtime_adapters_come_from_the_source_unless_places_are_named() -> None:
    """FR-30: a client never chooses a path of the server that nobody allowed."""
    assert AppArgs(model="m").lora_prefixes() == ()
    assert AppArgs(model="m", adapter_source="s3://b/p").lora_prefixes() == ("s3://b/p",)
    args = AppArgs(model="m", adapter_source="s3://b/p", allowed_lora_prefixes=["/srv"])
    assert args.lora_prefixes() == ("/srv",)


def test_the_example_config_is_valid() -> None:
    config = yaml.safe_load(EXAMPLE.read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "deployments.app:build"
    assert AppArgs(**application["args"]).model_names() == ("qwen",)


def test_ranks_may_be_actors_with_a_cpu_and_on_gpus_a_gpu_each() -> None:
    args = AppArgs(model="x", tensor_parallel_size=2, rank_placement="STRICT_PACK")
    assert (args.has_rank_actors, args.cpus_per_replica, args.gpus_of_replica) == (True, 2, 0)
    assert not AppArgs(model="x", rank_placement="STRICT_PACK").has_rank_actors
    for placement, gpus in (("process", 4), ("STRICT_PACK", 1)):
        args = AppArgs.model_validate(
            {"model": "x", "device": "cuda", "tensor_parallel_size": 4, "rank_placement": placement}
        )
        assert args.gpus_of_replica == gpus
