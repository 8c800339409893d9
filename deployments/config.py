"""The application's arguments, as `serve run`, a Serve config file and the command line give them.

Checked here, before anything starts; unknown names are errors.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from deployments.label_cap import DEFAULT_MAX_NAMES
from engine.adapters.names import is_adapter_name, is_reserved
from engine.config import EngineConfig
from router.autoscaling import Bounds
from router.policy import DEFAULT_MAX_WAIT_S, DEFAULT_MEMORY_S, DEFAULT_SLACK

_ENGINE_OPTIONS = frozenset(f.name for f in fields(EngineConfig)) - {
    "model", "device", "tensor_parallel_size",
}  # fmt: skip


class RouterArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    slack: int = Field(default=DEFAULT_SLACK, ge=1)  # requests; differences in load below it are noise
    memory_s: float = Field(default=DEFAULT_MEMORY_S, gt=0)  # of own placements that are not reported yet
    max_wait_s: float = Field(default=DEFAULT_MAX_WAIT_S, gt=0)  # for a replica, else refused


class AutoscalingArgs(BaseModel):
    """By tokens, pages, queues and adapters: see `router.autoscaling`."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(default=1, ge=0)  # 0: none while nobody asks; the next request starts one
    max_replicas: int = Field(ge=1)
    upscale_delay_s: float = Field(default=10.0, ge=0)  # that there must be too few
    downscale_delay_s: float = Field(default=600.0, ge=0)  # that there must be too many

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("autoscaling: min_replicas is above max_replicas")
        return self

    def bounds(self) -> Bounds:
        return Bounds(self.min_replicas, self.max_replicas, self.upscale_delay_s, self.downscale_delay_s)


class AppArgs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str  # directory, hub id or s3://bucket/prefix
    served_model_name: list[str] = []  # none: the last part of `model`
    adapter_source: str | None = None  # directory or s3://bucket/prefix; each sub-folder is an adapter
    lora_modules: dict[str, str] = {}  # name -> directory or s3:// prefix of one adapter
    device: Literal["cpu", "cuda"] = "cpu"
    engine: dict[str, Any] = {}  # other fields of EngineConfig

    num_replicas: int = Field(default=1, ge=1)  # with `autoscaling`: to begin with
    autoscaling: AutoscalingArgs | None = None
    num_ingress_replicas: int = Field(default=1, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    # a group's ranks: processes of the replica, or Ray actors placed by that strategy, also across hosts
    rank_placement: Literal["process", "STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "process"
    router: RouterArgs = RouterArgs()

    api_key_digests: list[str] = []  # SHA-256, hexadecimal; none: open to all
    allow_runtime_lora_updating: bool = False
    allowed_lora_prefixes: list[str] = []  # where run-time adapters may come from; none: the adapter source
    catalog_file: Path | None = None  # of run-time loads; none: beside the source's adapters

    stream_interval_s: float = Field(default=0.04, ge=0)  # least time between two chunks of one stream
    graceful_shutdown_timeout_s: float = Field(default=120.0, gt=0)  # above the longest answer
    metrics_max_adapters: int = Field(default=DEFAULT_MAX_NAMES, ge=1)  # named; the rest share a label
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535
    )  # of each replica's own page, beside the API's

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _one_name_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("api_key_digests")
    @classmethod
    def _digests(cls, value: list[str]) -> list[str]:
        for digest in value:
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise ValueError("api_key_digests holds something that is no SHA-256 digest")
        return value

    @field_validator("lora_modules")
    @classmethod
    def _names_of_adapters(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not is_adapter_name(name) or is_reserved(name):
                raise ValueError(f"lora_modules: no request can ask for an adapter named {name!r}")
        return value

    @model_validator(mode="after")
    def _adapters_are_not_named_as_the_base(self) -> Self:
        for name in self.model_names():
            if name in self.lora_modules:
                raise ValueError(f"lora_modules: {name!r} is the base model, which would answer for it")
        return self

    @model_validator(mode="after")
    def _engine_can_be_built(self) -> Self:
        unknown = sorted(self.engine.keys() - _ENGINE_OPTIONS)
        if unknown:
            raise ValueError(
                f"engine: no option {unknown[0]!r}; there are {', '.join(sorted(_ENGINE_OPTIONS))}"
            )
        self.engine_config()
        return self

    @model_validator(mode="after")
    def _begins_within_bounds(self) -> Self:
        scaling = self.autoscaling
        if scaling and not scaling.min_replicas <= self.num_replicas <= scaling.max_replicas:
            raise ValueError("num_replicas is not between autoscaling's min_replicas and max_replicas")
        return self

    @property
    def has_rank_actors(self) -> bool:
        return self.rank_placement != "process" and self.tensor_parallel_size > 1

    @property
    def cpus_per_replica(self) -> int:
        """Logical ones."""
        return self.tensor_parallel_size if self.has_rank_actors else 1

    @property
    def gpus_of_replica(self) -> int:
        """Of its own process and its children: a rank that is an actor has one of its own."""
        if self.device != "cuda":
            return 0
        return 1 if self.has_rank_actors else self.tensor_parallel_size

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas

    def engine_config(self) -> EngineConfig:
        values = {
            "model": self.model,
            "device": self.device,
            "tensor_parallel_size": self.tensor_parallel_size,
            **self.engine,
        }
        return TypeAdapter(EngineConfig).validate_python(values)

    def model_names(self) -> tuple[str, ...]:
        # a server's directory is nobody's business
        return tuple(self.served_model_name) or (self.model.rstrip("/").rpartition("/")[2] or self.model,)

    def lora_prefixes(self) -> tuple[str, ...]:
        if self.allowed_lora_prefixes or self.adapter_source is None:
            return tuple(self.allowed_lora_prefixes)
        return (self.adapter_source,)
