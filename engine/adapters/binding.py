"""Which tensor of an adapter goes where in the model: every one is bound, or the adapter is refused.

Pure: works on names and shapes, before the tensors' bytes are read. The set of adapted modules is taken from
the tensors' names; `target_modules` is only compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.adapters.files import WEIGHTS_FILE
from engine.adapters.peft_config import PeftConfig
from engine.adapters.safetensors_header import TensorEntry
from engine.errors import AdapterRefused
from engine.shape import BLOCKS, PROJECTIONS, ModelShape

DTYPES = ("F32", "F16", "BF16")

_PREFIX = "base_model.model."  # PEFT's; tools that save a bare state dict omit it
# where the decoder's layers hang: in a causal LM, in a bare model, and in two generations of wrapper models
_DECODERS = ("model.", "", "model.language_model.", "language_model.model.")

_TENSOR = re.compile(
    rf"(?:{re.escape(_PREFIX)})?(?:{'|'.join(map(re.escape, _DECODERS))})"
    rf"layers\.(?P<layer>0|[1-9]\d{{0,5}})\.(?P<block>self_attn|mlp)\.(?P<projection>{'|'.join(PROJECTIONS)})"
    r"\.lora_(?P<side>[AB])\.weight",
    re.ASCII,
)

# in the order in which they explain best
_REASONS = (
    ("lora_magnitude_vector", "DoRA magnitudes are not supported"),
    (".bias", "biases are not supported"),
    ("lm_head", "adapting lm_head is not supported"),
    ("embed_tokens", "adapting embed_tokens is not supported"),
    ("qkv", "fused projections are not supported: save q_proj, k_proj and v_proj apart"),
    ("gate_up", "fused projections are not supported: save gate_proj and up_proj apart"),
)
_MAX_NAMED = 6  # tensors in one message


@dataclass(frozen=True, slots=True)
class BoundModule:
    layer: int
    projection: int  # index in PROJECTIONS
    rank: int
    scale: float
    lora_a: TensorEntry  # [rank, in]
    lora_b: TensorEntry  # [out, rank]

    @property
    def name(self) -> str:
        return module_name(self.layer, self.projection)


def module_name(layer: int, projection: int) -> str:
    return f"model.layers.{layer}.{BLOCKS[projection]}.{PROJECTIONS[projection]}"


def bind(
    entries: Sequence[TensorEntry], config: PeftConfig, shape: ModelShape, max_rank: int
) -> list[BoundModule]:
    """The adapted modules by layer and projection. Raises AdapterRefused, its `param` naming the tensor."""
    if not entries:
        raise AdapterRefused(f"{WEIGHTS_FILE} holds no tensors", param=WEIGHTS_FILE)
    matches = [(entry, _match(entry.name)) for entry in entries]
    _refuse_unbound([entry for entry, match in matches if match is None], len(entries), config)
    pairs: dict[tuple[int, int], dict[str, TensorEntry]] = {}
    for entry, match in matches:
        assert match is not None
        layer, projection, side = int(match["layer"]), PROJECTIONS.index(match["projection"]), match["side"]
        if layer >= shape.num_layers:
            raise AdapterRefused(
                f"{entry.name} is for layer {layer}, this model has layers 0 to {shape.num_layers - 1}",
                param=entry.name,
            )
        other = pairs.setdefault((layer, projection), {}).setdefault(side, entry)
        if other is not entry:
            raise AdapterRefused(f"{other.name} and {entry.name} are for the same module", param=entry.name)
    return [_bind_pair(*key, pairs[key], config, shape, max_rank) for key in sorted(pairs)]


def check_target_modules(config: PeftConfig, modules: Iterable[BoundModule]) -> list[str]:
    """Warnings where a literal `target_modules` and the tensors disagree."""
    if config.target_modules is None:
        return []
    # sets, since a tenant may list as many targets as a file can hold
    endings = {module.name: _endings(module.name) for module in modules}
    listed, adapted = set(config.target_modules), set().union(*endings.values())
    unused = [target for target in config.target_modules if target not in adapted]
    unlisted = sorted(name for name in endings if listed.isdisjoint(endings[name]))
    warnings = []
    if unused:
        warnings.append(f"target_modules lists {_some(unused)}, but no tensor adapts it")
    if unlisted:
        warnings.append(f"target_modules does not list {_some(unlisted)}, which has tensors and is adapted")
    return warnings


def _match(name: str) -> re.Match[str] | None:
    match = _TENSOR.fullmatch(name)
    if match is None or BLOCKS[PROJECTIONS.index(match["projection"])] != match["block"]:
        return None
    return match


def _refuse_unbound(unbound: list[TensorEntry], num_present: int, config: PeftConfig) -> None:
    """All or nothing: an adapter that takes effect in part is a wrong model."""
    if not unbound and not config.modules_to_save:
        return
    tensors = f"{num_present - len(unbound)} of {num_present} tensors bound"
    if unbound:
        tensors += f"; not bound: {_some(map(str, unbound))}"
    if config.modules_to_save:
        modules = _some(config.modules_to_save)
        raise AdapterRefused(
            f"modules_to_save = {modules}: fully trained modules are not supported; {tensors}",
            param="modules_to_save",
        )
    first = unbound[0].name
    sample = f"{_PREFIX}{module_name(0, 0)}.lora_A.weight"
    reason = f"this model has tensors like {sample}"
    for part, explanation in _REASONS:
        if any(part in entry.name for entry in unbound):
            reason = explanation
            break
    raise AdapterRefused(f"{tensors}; {reason}", param=first)


def _bind_pair(
    layer: int,
    projection: int,
    pair: dict[str, TensorEntry],
    config: PeftConfig,
    shape: ModelShape,
    max_rank: int,
) -> BoundModule:
    if len(pair) == 1:
        (side,) = pair
        raise AdapterRefused(
            f"{pair[side].name} has no lora_{'B' if side == 'A' else 'A'} beside it", param=pair[side].name
        )
    lora_a, lora_b = pair["A"], pair["B"]
    # PEFT matches its patterns with the name that the module had in training
    trained_name = lora_a.name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
    rank = config.rank(trained_name)
    in_features, out_features = shape.widths(projection)
    for entry in (lora_a, lora_b):
        if entry.dtype not in DTYPES:
            raise AdapterRefused(
                f"{entry.name} is {entry.dtype}; supported: {', '.join(DTYPES)}", param=entry.name
            )
    _check_rank(lora_a, in_features, rank, max_rank)
    _check_shape(lora_a, (rank, in_features))
    _check_shape(lora_b, (out_features, rank))
    return BoundModule(layer, projection, rank, config.scale(trained_name), lora_a, lora_b)


def _check_rank(lora_a: TensorEntry, in_features: int, rank: int, max_rank: int) -> None:
    """Where only the rank is wrong, say so."""
    if len(lora_a.shape) != 2 or lora_a.shape[1] != in_features:
        return
    if lora_a.shape[0] > max_rank:
        raise AdapterRefused(
            f"{lora_a.name} has rank {lora_a.shape[0]}, at most {max_rank} is served", param=lora_a.name
        )
    if lora_a.shape[0] != rank:
        raise AdapterRefused(
            f"{lora_a.name} has rank {lora_a.shape[0]}, the config's r and rank_pattern say {rank}",
            param=lora_a.name,
        )


def _check_shape(entry: TensorEntry, want: tuple[int, int]) -> None:
    if entry.shape != want:
        raise AdapterRefused(f"{entry.name}: got {list(entry.shape)}, want {list(want)}", param=entry.name)


def _endings(name: str) -> set[str]:
    """The targets that would adapt this module."""
    parts = name.split(".")
    return {".".join(parts[i:]) for i in range(len(parts))}


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
