"""Reads a checkpoint's safetensors into fused weights: q, k, v stacked by rows, gate and up likewise.

One tensor is in flight at a time, and of it only what this rank holds is read. Every expected tensor must be
present and every present one used.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import InvalidRequest
from engine.model.spec import ModelSpec
from engine.shape import BLOCKS, PROJECTIONS
from engine.sharding import WHOLE, Shard, ShardedShape, shard_shape
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
    lm_head: torch.Tensor  # [this rank's part of vocab, hidden], packed

    @property
    def num_bytes(self) -> int:
        """A head that is the embedding counts once."""
        layers = (getattr(layer, field.name) for layer in self.layers for field in fields(layer))
        tensors = {id(tensor): tensor for tensor in (self.embed, self.final_norm, self.lm_head, *layers)}
        # packed tensors know their number of elements, but not their bytes
        num_elements: int = sum(tensor.numel() for tensor in tensors.values())
        return num_elements * self.embed.element_size()


@dataclass(frozen=True, slots=True)
class _Destination:
    """Where a checkpoint's tensor, or this rank's part of it, goes."""

    tensor: torch.Tensor
    part: tuple[slice, ...]
    shape: tuple[int, ...]  # of the whole


def load_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu", shard: Shard = WHOLE
) -> LlamaWeights:
    """Raises InvalidRequest, its `param` naming the tensor that is missing, unknown or of a wrong shape."""
    sharded = shard_shape(spec.shape, shard)
    weights = allocate_weights(sharded, spec.tie_word_embeddings, dtype, device)
    missing = _destinations(spec, sharded, weights)
    for name, stored in _stored_tensors(Path(spec.path)):
        if _ignored(name, spec):
            continue
        destination = missing.pop(name, None)
        if destination is None:
            raise InvalidRequest(f"checkpoint tensor {name} has no place in the model", param=name)
        found = tuple(stored.get_shape())
        if found != destination.shape:
            raise InvalidRequest(
                f"checkpoint tensor {name} is {list(found)}, expected {list(destination.shape)}", param=name
            )
        destination.tensor.copy_(stored[destination.part])
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
    sharded: ShardedShape, tied: bool, dtype: torch.dtype, device: torch.device | str
) -> LlamaWeights:
    """Uninitialised."""
    shape = sharded.local

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
    vocab = sharded.vocab
    lm_head = embed[vocab.start : vocab.stop] if tied else empty(len(vocab), hidden)
    return LlamaWeights(embed, layers, empty(hidden), lm_head)


def _pack(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv=pack_weight(layer.qkv),
        o=pack_weight(layer.o),
        gate_up=pack_weight(layer.gate_up),
        down=pack_weight(layer.down),
    )


def _destinations(spec: ModelSpec, sharded: ShardedShape, weights: LlamaWeights) -> dict[str, _Destination]:
    """By name in the checkpoint."""

    def whole(tensor: torch.Tensor) -> _Destination:
        return _Destination(tensor, (slice(None),), tuple(tensor.shape))

    places = {
        "model.embed_tokens.weight": whole(weights.embed),
        "model.norm.weight": whole(weights.final_norm),
    }
    if not spec.tie_word_embeddings:
        vocab, full = sharded.vocab, (spec.shape.vocab_size, spec.shape.hidden_size)
        places["lm_head.weight"] = _Destination(weights.lm_head, (slice(vocab.start, vocab.stop),), full)
    local = sharded.local
    for i, layer in enumerate(weights.layers):
        prefix = f"model.layers.{i}."
        places[f"{prefix}input_layernorm.weight"] = whole(layer.input_norm)
        places[f"{prefix}post_attention_layernorm.weight"] = whole(layer.post_norm)
        q, k, v = torch.split(layer.qkv, [local.q_size, local.kv_size, local.kv_size])
        tensors = (q, k, v, layer.o, *layer.gate_up.chunk(2), layer.down)
        for projection, tensor in enumerate(tensors):
            name = f"{prefix}{BLOCKS[projection]}.{PROJECTIONS[projection]}.weight"
            places[name] = _projection(sharded, projection, tensor)
    return places


def _projection(sharded: ShardedShape, projection: int, tensor: torch.Tensor) -> _Destination:
    part = sharded.parts[projection]
    rows = slice(part.start, part.end)
    in_features, out_features = sharded.full.widths(projection)
    index = (rows,) if part.by_output else (slice(None), rows)
    return _Destination(tensor, index, (out_features, in_features))


def _stored_tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Names, each with safetensors' slice of it: what is indexed is read."""
    for file in _weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict
                yield name, tensors.get_slice(name)


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
