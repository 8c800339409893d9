"""What a base model's directory says about it: sizes, rotary parameters, special tokens. No weights.

Only plain Llama checkpoints are accepted; whatever the forward pass would ignore is refused by name.

config.json is read as transformers' LlamaConfig reads it (a test compares them), but not by it: that brings
PyTorch and more with it, 200 MB and seconds in each of a server's processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine.errors import InvalidRequest
from engine.model.remote import fetch_small_files, is_remote
from engine.shape import ModelShape
from engine.sharding import Shard, shard_shape

_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "quantization_config": (None,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu",),
}
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Of old checkpoints, which do not name them."""
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
    config = _DEFAULTS | _read_json(path / "config.json")
    _refuse_unsupported(config)
    return ModelSpec(
        path=str(path),
        shape=_shape(config),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        rope=_rope_spec(config),
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        max_position_embeddings=_size(config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(path, config),
        bos_token_id=config["bos_token_id"],
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


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{file} is not JSON: {error}", param="model") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{file} holds no JSON object", param="model")
    return content


def _refuse_unsupported(config: dict[str, Any]) -> None:
    for field, accepted in _SUPPORTED.items():
        value = config.get(field)
        if value not in accepted:
            raise InvalidRequest(
                f"base model has {field} = {value!r}; supported: {accepted[0]!r}", param=field
            )


def _shape(config: dict[str, Any]) -> ModelShape:
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_kv_heads = _size(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InvalidRequest(
            f"{num_heads} attention heads cannot share {num_kv_heads} KV heads", param="num_key_value_heads"
        )
    return ModelShape(
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_size(config, "head_dim", hidden_size // num_heads),
        vocab_size=_size(config, "vocab_size"),
    )


def _size(config: dict[str, Any], field: str, default: int | None = None) -> int:
    """`default`: where it is absent or null."""
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise InvalidRequest(f"base model has {field} = {value!r}, not a positive integer", param=field)
    return value


def _number(config: dict[str, Any], field: str, prefix: str = "") -> float:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(
            f"base model has {prefix}{field} = {value!r}, not a number", param=prefix + field
        )
    return float(value)


def _rope_spec(config: dict[str, Any]) -> RopeSpec:
    """transformers 5 writes `rope_parameters`; before, there were `rope_theta` and `rope_scaling`."""
    outside = ("rope_theta", "partial_rotary_factor")
    rope = {name: config[name] for name in outside if config.get(name) is not None}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidRequest(
            f"partial_rotary_factor = {rope['partial_rotary_factor']} is not supported",
            param="rope_parameters.partial_rotary_factor",
        )
    number = partial(_number, rope, prefix="rope_parameters.")
    theta = number("rope_theta")
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", factor=number("factor"))
        case "llama3":
            own = config.get("original_max_position_embeddings")
            own = own or rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
            return RopeSpec(
                theta,
                "llama3",
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_position_embeddings=own,
            )
        case other:
            raise InvalidRequest(
                f"rope_type {other!r} is not supported; supported: default, linear, llama3",
                param="rope_parameters.rope_type",
            )


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json where it has any: chat models list their end-of-turn token only there."""
    file = path / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise InvalidRequest(f"base model has eos_token_id = {value!r}, no token ids", param="eos_token_id")
    return tuple(ids)
