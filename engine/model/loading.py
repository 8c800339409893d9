"""Reads a checkpoint's safetensors into fused weights: q, k, v stacked by rows, gate and up likewise.

Every expected tensor must be present and every present one used. Of each tensor a rank reads only what it
holds. From S3 that would be a request a row where a tensor is split by columns (o, down): there each rank
reads 1/N of the rows instead, and the ranks swap, so that every byte leaves S3 once for a group.

    bytes a rank reads = embedding and norms + its part of q k v, gate up, head + 1/N of o and down
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace

import torch

from engine.errors import InvalidRequest
from engine.model.checkpoint_tensors import StoredTensor, open_tensors
from engine.model.spec import ModelSpec
from engine.model.weight_reader import LOOKAHEAD, WeightReader, wait
from engine.shape import BLOCKS, PROJECTIONS
from engine.sharding import WHOLE, Shard, ShardedShape, shard_shape, split_range
from engine.tensor_parallel.comm import ALONE, Comm
from kernels.linear import pack_weight

LOCAL_READS = 2  # at once: the disk reads ahead by itself
REMOTE_READS = 16  # one connection gets tens of MB/s


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
    shape: tuple[int, ...]  # of the whole
    rows: range
    columns: slice | None = None  # None: all
    projection: int | None = None  # of a tensor that is split by columns


def load_weights(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    comm: Comm = ALONE,
) -> LlamaWeights:
    """Raises InvalidRequest, its `param` naming the tensor that is missing, unknown or of a wrong shape.

    From S3 all ranks of a group must call it at the same time.
    """
    sharded = shard_shape(spec.shape, shard)
    weights = allocate_weights(sharded, spec.tie_word_embeddings, dtype, device)
    with open_tensors(spec) as stored:
        _fill(stored, _match(spec, stored, _destinations(spec, sharded, weights)), spec, sharded, comm)
    layers = deque(weights.layers)
    embed, final_norm, lm_head = weights.embed, weights.final_norm, weights.lm_head
    # from here on a layer's unpacked weights go as soon as its packed ones exist
    del weights
    return LlamaWeights(
        embed, tuple(_pack(layers.popleft()) for _ in range(len(layers))), final_norm, pack_weight(lm_head)
    )


def _match(
    spec: ModelSpec, stored: Mapping[str, StoredTensor], places: dict[str, _Destination]
) -> dict[str, _Destination]:
    """The places by name, in the checkpoint's order."""
    matched = {}
    for name, tensor in stored.items():
        if _ignored(name, spec):
            continue
        place = places.pop(name, None)
        if place is None:
            raise InvalidRequest(f"checkpoint tensor {name} has no place in the model", param=name)
        if tensor.shape != place.shape:
            raise InvalidRequest(
                f"checkpoint tensor {name} is {list(tensor.shape)}, expected {list(place.shape)}", param=name
            )
        matched[name] = place
    if places:
        name = next(iter(places))
        raise InvalidRequest(f"checkpoint lacks {len(places)} tensors, first {name}", param=name)
    return matched


def _fill(
    stored: Mapping[str, StoredTensor],
    places: Mapping[str, _Destination],
    spec: ModelSpec,
    sharded: ShardedShape,
    comm: Comm,
) -> None:
    shard = sharded.shard
    swaps = spec.remote_uri is not None and shard.world > 1
    label = f"weights of rank {shard.rank}" if shard.world > 1 else "weights"
    with WeightReader(label, REMOTE_READS if spec.remote_uri else LOCAL_READS) as reader:
        reads = []
        for name, place in places.items():
            if not (swaps and place.projection is not None):
                reads += reader.start(stored[name], place.tensor, place.rows, place.columns)
        if swaps:
            # in the same order on all ranks
            names = sorted(name for name, place in places.items() if place.projection is not None)
            _swap_all(reader, [(stored[name], places[name]) for name in names], sharded, comm)
        wait(reads)


def _swap_all(
    reader: WeightReader,
    tensors: Sequence[tuple[StoredTensor, _Destination]],
    sharded: ShardedShape,
    comm: Comm,
) -> None:
    """Read some whole rows of each tensor, and swap them for this rank's columns of all rows."""
    begun: deque[tuple[_Destination, torch.Tensor, list[Future[None]]]] = deque()
    for tensor, place in tensors:
        rows = split_range(place.shape[0], sharded.shard)
        buffer = torch.empty(len(rows), place.shape[1], dtype=tensor.dtype)
        begun.append((place, buffer, reader.start(tensor, buffer, rows)))
        if len(begun) > LOOKAHEAD:
            _swap(*begun.popleft(), sharded, comm)
    while begun:
        _swap(*begun.popleft(), sharded, comm)


def _swap(
    place: _Destination,
    rows: torch.Tensor,
    reads: list[Future[None]],
    sharded: ShardedShape,
    comm: Comm,
) -> None:
    wait(reads)
    assert place.projection is not None
    world = sharded.shard.world
    blocks, sizes, row_ranges = [], [], []
    for rank in range(world):
        part = shard_shape(sharded.full, Shard(rank, world)).parts[place.projection]
        blocks.append(rows[:, part.start : part.end].flatten())
        row_ranges.append(split_range(place.shape[0], Shard(rank, world)))
        sizes.append(len(row_ranges[-1]) * place.tensor.shape[1])
    for row_range, block in zip(row_ranges, comm.swap(blocks, sizes), strict=True):
        target = place.tensor[row_range.start : row_range.stop]
        target.copy_(block.view(target.shape))


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
        return _Destination(tensor, tuple(tensor.shape), range(len(tensor)))

    places = {
        "model.embed_tokens.weight": whole(weights.embed),
        "model.norm.weight": whole(weights.final_norm),
    }
    if not spec.tie_word_embeddings:
        vocab, full = sharded.vocab, (spec.shape.vocab_size, spec.shape.hidden_size)
        places["lm_head.weight"] = _Destination(weights.lm_head, full, vocab)
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
    in_features, out_features = sharded.full.widths(projection)
    shape = (out_features, in_features)
    if part.by_output:
        return _Destination(tensor, shape, range(part.start, part.end))
    return _Destination(tensor, shape, range(out_features), slice(part.start, part.end), projection)


def _ignored(name: str, spec: ModelSpec) -> bool:
    # old exporters stored the rotary buffer, some the tied head a second time
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_word_embeddings)
