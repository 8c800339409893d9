"""Reads a checkpoint's safetensors into fused weights: q, k, v stacked by rows, gate and up likewise.

One tensor is in flight at a time. Every expected tensor must be present and every present one used.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from engine.errors import InvalidRequest
from engine.model.spec import ModelSpec
from engine.shape import ModelShape
from kernels.linear import pack_weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linears are [out, in], as the checkpoint stores them, packed by kernels.linear.pack_weight."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [q + 2 kv, hidden]
    o: torch.Tensor  # [hidden, q]
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden], packed

    @property
    def num_bytes(self) -> int:
        """A head that is the embedding counts once."""
        layers = (getattr(layer, field.name) for layer in self.layers for field in fields(layer))
        tensors = {id(tensor): tensor for tensor in (self.embed, self.final_norm, self.lm_head, *layers)}
        # packed tensors know their number of elements, but not their bytes
        num_elements: int = sum(tensor.numel() for tensor in tensors.values())
        return num_elements * self.embed.element_size()


def load_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu") -> LlamaWeights:
    """Raises InvalidRequest, its `param` naming the tensor that is missing, unknown or of a wrong shape."""
    weights = allocate_weights(spec.shape, spec.tie_word_embeddings, dtype, device)
    missing = _destinations(spec, weights)
    for name, read in _stored_tensors(Path(spec.path)):
        if _ignored(name, spec):
            continue
        destination = missing.pop(name, None)
        if destination is None:
            raise InvalidRequest(f"checkpoint tensor {name} has no place in the model", param=name)
        tensor = read()
        if tensor.shape != destination.shape:
            raise InvalidRequest(
                f"checkpoint tensor {name} is {list(tensor.shape)}, expected {list(destination.shape)}",
                param=name,
            )
        destination.copy_(tensor)
    if missing:
        name = next(iter(missing))
        raise InvalidRequest(f"checkpoint lacks {len(missing)} tensors, first {name}", param=name)
    layers = deque(weights.layers)
    embed, final_norm, lm_head = weights.embed, weights.final_norm, weights.lm_head
    # from here on a layer's unpacked weights go as soon as its packed ones exist
    del weights, destination
    return LlamaWeights(
        embed, tuple(_pack(layers.popleft()) for _ in range(len(layers))), final_norm, pack_weight(lm_head)
    )


def allocate_weights(
    shape: ModelShape, tied: bool, dtype: torch.dtype, device: torch.device | str
) -> LlamaWeights:
    """Uninitialised."""

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    hidden, inter = shape.hidden_size, shape.intermediate_size
    layers = tuple(
        LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(shape.q_size + 2 * shape.kv_size, hidden),
            o=empty(hidden, shape.q_size),
            post_norm=empty(hidden),
            gate_up=empty(2 * inter, hidden),
            down=empty(hidden, inter),
        )
        for _ in range(shape.num_layers)
    )
    embed = empty(shape.vocab_size, hidden)
    return LlamaWeights(embed, layers, empty(hidden), embed if tied else empty(shape.vocab_size, hidden))


def _pack(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv=pack_weight(layer.qkv),
        o=pack_weight(layer.o),
        gate_up=pack_weight(layer.gate_up),
        down=pack_weight(layer.down),
    )


def _destinations(spec: ModelSpec, weights: LlamaWeights) -> dict[str, torch.Tensor]:
    """Checkpoint name -> the view that takes it."""
    shape = spec.shape
    names = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if not spec.tie_word_embeddings:
        names["lm_head.weight"] = weights.lm_head
    for i, layer in enumerate(weights.layers):
        q, k, v = torch.split(layer.qkv, [shape.q_size, shape.kv_size, shape.kv_size])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "input_layernorm": layer.input_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.o,
            "post_attention_layernorm": layer.post_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        names |= {f"model.layers.{i}.{part}.weight": tensor for part, tensor in parts.items()}
    return names


def _stored_tensors(directory: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Names, each with a function that reads it."""
    for file in _weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                yield name, partial(tensors.get_tensor, name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    files = [directory / shard for shard in shards]
    for file in files:
        if not file.is_file():
            raise InvalidRequest(f"{file} is missing; only safetensors are read", param="model")
    return files


def _ignored(name: str, spec: ModelSpec) -> bool:
    # old exporters stored the rotary buffer, some the tied head a second time
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)
