"""adapter_config.json as PEFT writes it: what it changes in the maths is understood or refused by name.

A key that is not known loads while it is off (null, false or empty), so that files of a newer PEFT do, and is
refused as soon as it has a value. `base_model_name_or_path` is never used to load anything.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from typing import Any

from engine.adapters.files import CONFIG_FILE
from engine.adapters.patterns import Patterns
from engine.errors import AdapterRefused

_MAX_NAME_CHARS = 128
_MAX_RANK = 1 << 20  # far beyond what is served, so that messages stay short

# PEFT's defaults
_DEFAULT_R = 8
_DEFAULT_ALPHA = 8

# how training began, where that leaves the base weights as they were
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")

# without effect on how a finished adapter is applied
_IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
        "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "modules_to_save", "peft_type", "r",
        "rank_pattern", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip

_REASONS = {
    "use_dora": "DoRA rescales the base weights; it is not supported",
    "lora_bias": "biases beside lora_B are not supported",
    "use_bdlora": "block-diagonal A and B (BD-LoRA) are not supported",
    "trainable_token_indices": "retrained token embeddings are not supported",
    "layer_replication": "replicated layers are not supported",
    "target_parameters": "LoRA on bare parameters is not supported",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Patterns
    alpha_pattern: Patterns
    target_modules: tuple[str, ...] | None  # None: a regular expression or absent; never evaluated
    modules_to_save: tuple[str, ...]  # refused with the tensors' names, where those are known
    warnings: tuple[str, ...]

    def rank(self, module: str) -> int:
        """`module`: its name as in the file, without PEFT's prefix."""
        rank = self.rank_pattern.find(module)
        return self.r if rank is None else int(rank)

    def scale(self, module: str) -> float:
        alpha = self.alpha_pattern.find(module)
        rank = self.rank(module)
        return (self.lora_alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def parse_peft_config(content: bytes) -> PeftConfig:
    """Raises AdapterRefused, its `param` naming the field."""
    config = _parse_json(content)
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", config.get("peft_type"), "only LORA adapters are served")
    for key, value in config.items():
        if key not in _IGNORED and key not in _READ and _is_on(value):
            raise _refused(_shown(key), value, _REASONS.get(key, "not supported"))
    if config.get("bias", "none") != "none":
        raise _refused("bias", config["bias"], "trained biases of the base model are not supported")
    _check_init(config.get("init_lora_weights", True))
    return PeftConfig(
        r=_rank("r", config.get("r", _DEFAULT_R)),
        lora_alpha=_alpha("lora_alpha", config.get("lora_alpha", _DEFAULT_ALPHA)),
        use_rslora=_flag("use_rslora", config.get("use_rslora")),
        rank_pattern=_patterns(config, "rank_pattern"),
        alpha_pattern=_patterns(config, "alpha_pattern"),
        target_modules=_target_modules(config.get("target_modules")),
        modules_to_save=_names("modules_to_save", config.get("modules_to_save") or []),
        warnings=_warnings(config),
    )


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{CONFIG_FILE} is not valid JSON", param=CONFIG_FILE) from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG_FILE} holds no JSON object", param=CONFIG_FILE)
    return config


def _is_on(value: object) -> bool:
    # by identity: 0 == False, and an unknown key that is 0 may mean something
    return not (value is None or value is False or value in ("", [], {}))


def _check_init(value: object) -> None:
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in _PLAIN_INITS):
        return
    raise _refused(
        "init_lora_weights",
        value,
        "such an adapter is relative to changed base weights; convert it to plain LoRA when saving it",
    )


def _rank(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_RANK:
        raise _refused(field, value, f"a rank is a positive whole number, at most {_MAX_RANK}")
    return value


def _alpha(field: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # an int of a thousand digits is valid JSON
        alpha = float(value) if abs(value) < 1e30 else math.inf
        if math.isfinite(alpha) and alpha != 0.0:
            return alpha
    raise _refused(field, value, "an alpha is a finite number other than 0")


def _flag(field: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _refused(field, value, "neither true nor false")
    return bool(value)


def _names(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _refused(field, value, "not a list of names")
    return tuple(map(_shown, value))


def _target_modules(value: object) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None
    return _names("target_modules", value)


def _patterns(config: dict[str, Any], field: str) -> Patterns:
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise _refused(field, value, "not an object of module names and numbers")
    check = _rank if field == "rank_pattern" else _alpha
    try:
        return Patterns({key: check(f"{field}.{_shown(key)}", number) for key, number in value.items()})
    except ValueError as error:
        raise AdapterRefused(f"{field}: {error}", param=field) from error


def _warnings(config: dict[str, Any]) -> tuple[str, ...]:
    warnings = []
    task_type = config.get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        warnings.append(f"task_type is {_short(task_type)}; served as CAUSAL_LM")
    if _is_on(config.get("fan_in_fan_out")):
        warnings.append("fan_in_fan_out is set; it has no effect on this model's layers")
    return tuple(warnings)


def _refused(field: str, value: object, reason: str) -> AdapterRefused:
    return AdapterRefused(f"{field} = {_short(value)}: {reason}", param=field)


def _shown(name: str) -> str:
    """As it is, unless an answer or a log could not hold it; then it is no module's name either."""
    return name if len(name) <= _MAX_NAME_CHARS and name.isprintable() else _short(name)


def _short(value: object) -> str:
    """Bounded: it comes from a tenant's file and ends in answers and logs."""
    return reprlib.repr(value)
