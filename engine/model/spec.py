"""What a base model's directory says about it: sizes, rotary parameters, special tokens. No weights.

Only plain Llama checkpoints are accepted; whatever the forward pass would ignore is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import InvalidRequest
from engine.model.remote import fetch_small_files, is_remote
from engine.shape import ModelShape
from engine.sharding import Shard, shard_shape

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
}
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    theta: float
    type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0  # linear and llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_max_position_embeddings: int = 0  # llama3


@dataclass(frozen=True, slots=True)
class ModelSpec:
    path: str  # a local directory: configuration and tokenizer, and the weights unless they are remote
    shape: ModelShape
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    remote_uri: str | None = None  # S3 prefix of the weights


def local_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """With the shape of what a rank holds."""
    return replace(spec, shape=shard_shape(spec.shape, shard).local)


def load_model_spec(model: str) -> ModelSpec:
    """Of a directory, a hub id or s3://bucket/prefix.

    Raises InvalidRequest, its `param` naming the config field that is not supported, or what S3 raises.
    """
    path = fetch_small_files(model) if is_remote(model) else _resolve(model)
    _refuse_unsupported(json.loads((path / "config.json").read_bytes()), {"model_type": ("llama",)})
    # transformers imports torch; callers of the dataclasses above need neither
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(path).to_dict()
    _refuse_unsupported(config, _SUPPORTED)
    num_heads = config["num_attention_heads"]
    return ModelSpec(
        path=str(path),
        shape=ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
        ),
        rms_norm_eps=config["rms_norm_eps"],
        rope=_rope_spec(config),
        tie_word_embeddings=config["tie_word_embeddings"],
        max_position_embeddings=config["max_position_embeddings"],
        eos_token_ids=_eos_token_ids(path, config),
        bos_token_id=config.get("bos_token_id"),
        remote_uri=model if is_remote(model) else None,
    )


def _resolve(path_or_hub_id: str) -> Path:
    path = Path(path_or_hub_id)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidRequest(f"{path} holds no config.json", param="model")
        return path
    # an absent directory must not turn into a download
    if path.is_absolute() or path_or_hub_id.startswith(".") or path_or_hub_id.count("/") > 1:
        raise InvalidRequest(f"model directory {path} does not exist", param="model")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path_or_hub_id, allow_patterns=list(_HUB_FILES)))


def _refuse_unsupported(config: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> None:
    for field, accepted in supported.items():
        value = config.get(field)
        if value not in accepted:
            raise InvalidRequest(
                f"base model has {field} = {value!r}; supported: {accepted[0]!r}", param=field
            )


def _rope_spec(config: dict[str, Any]) -> RopeSpec:
    rope = config["rope_parameters"]
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidRequest(
            f"partial_rotary_factor = {rope['partial_rotary_factor']} is not supported",
            param="rope_parameters.partial_rotary_factor",
        )
    theta = float(rope["rope_theta"])
    match rope["rope_type"]:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", factor=float(rope["factor"]))
        case "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=rope.get("original_max_position_embeddings")
                or config["max_position_embeddings"],
            )
        case other:
            raise InvalidRequest(
                f"rope_type {other!r} is not supported; supported: default, linear, llama3",
                param="rope_parameters.rope_type",
            )


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json where it has any: chat models list their end-of-turn token only there."""
    file = path / "generation_config.json"
    generation = json.loads(file.read_bytes()) if file.is_file() else {}
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
