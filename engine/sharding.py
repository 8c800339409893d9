"""Which part of a model each rank of a tensor-parallel group holds. Plain ints, no torch.

As Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): q, k, v, gate and up are split by output, o and down
by input, so that two sums over the ranks a layer are all they exchange. A KV head goes with its query heads;
where there are more ranks than KV heads, several ranks hold the same one and share its query heads. Parts may
differ by one head, or by one block of the intermediate size.

An adapter follows its base: B of a projection that is split by output, and A of one that is split by input,
are split with it. The other side of each is whole on every rank ("replicate"), so that the delta is part of
the same sums and needs none of its own; or its rows are dealt to the ranks in turn ("full"), and each holds
1/N of the adapter, for four exchanges a layer (kernels.sgmv.split).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.errors import InvalidRequest
from engine.shape import PROJECTIONS, ModelShape

_BLOCK = 16  # columns: the kernels read that many at once
_BY_OUTPUT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world`."""

    rank: int = 0
    world: int = 1


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, end) of a projection's weight [out, in], or columns."""

    by_output: bool
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardedShape:
    """What a rank holds. `local` has its heads and intermediate size, but all of the vocabulary."""

    full: ModelShape
    shard: Shard
    local: ModelShape
    parts: tuple[Part, ...]  # of each projection
    vocab: range  # rows of the head

    @property
    def by_output(self) -> tuple[bool, ...]:
        return tuple(part.by_output for part in self.parts)


@dataclass(frozen=True, slots=True)
class AdapterShard:
    """What a rank holds of each adapter: some rows and features of A [rank, in] and of B [out, rank]."""

    sharded: ShardedShape
    is_full: bool  # else one side of each projection is whole

    def rows(self, projection: int, side: int, rank: int) -> range:
        """Of the `rank` rows of A (side 0) or columns of B (side 1); none may be left for the last ranks."""
        shard = self.sharded.shard
        if not self.is_full or self._is_split(projection, side):
            return range(rank)
        return range(shard.rank, rank, shard.world)

    def features(self, projection: int, side: int) -> range:
        """Of A's `in` or B's `out`."""
        if self._is_split(projection, side):
            part = self.sharded.parts[projection]
            return range(part.start, part.end)
        return range(self.sharded.full.widths(projection)[side])

    def num_rows(self, projection: int, side: int, rank: int) -> int:
        return len(self.rows(projection, side, rank))

    def _is_split(self, projection: int, side: int) -> bool:
        """With the base's weight."""
        return self.sharded.parts[projection].by_output == (side == 1)


def shard_adapters(shape: ModelShape, shard: Shard, is_full: bool) -> AdapterShard:
    """Raises as `shard_shape`."""
    return AdapterShard(shard_shape(shape, shard), is_full)


def shard_shape(shape: ModelShape, shard: Shard) -> ShardedShape:
    """Raises InvalidRequest where a rank would have no query head or no vocabulary."""
    if shard.world > min(shape.num_heads, shape.intermediate_size):
        raise InvalidRequest(
            f"tensor_parallel_size is {shard.world}, but the model has {shape.num_heads} query heads",
            param="tensor_parallel_size",
        )
    kv, q = _heads(shape, shard)
    block = _BLOCK if shape.intermediate_size % _BLOCK == 0 else 1
    inter = split_range(shape.intermediate_size // block, shard)
    inter = range(inter.start * block, inter.stop * block)
    head_dim = shape.head_dim
    ranges = {
        "q_proj": range(q.start * head_dim, q.stop * head_dim),
        "k_proj": range(kv.start * head_dim, kv.stop * head_dim),
        "v_proj": range(kv.start * head_dim, kv.stop * head_dim),
        "o_proj": range(q.start * head_dim, q.stop * head_dim),
        "gate_proj": inter,
        "up_proj": inter,
        "down_proj": inter,
    }
    return ShardedShape(
        shape,
        shard,
        replace(shape, num_heads=len(q), num_kv_heads=len(kv), intermediate_size=len(inter)),
        tuple(Part(name in _BY_OUTPUT, ranges[name].start, ranges[name].stop) for name in PROJECTIONS),
        split_range(shape.vocab_size, shard),
    )


def _heads(shape: ModelShape, shard: Shard) -> tuple[range, range]:
    """(KV heads, query heads)."""
    group = shape.num_heads // shape.num_kv_heads
    if shard.world <= shape.num_kv_heads:
        kv = split_range(shape.num_kv_heads, shard)
        return kv, range(kv.start * group, kv.stop * group)
    # the ranks are dealt to the KV heads, and share their head's queries
    head = shard.rank * shape.num_kv_heads // shard.world
    sharers = [r for r in range(shard.world) if r * shape.num_kv_heads // shard.world == head]
    if len(sharers) > group:
        raise InvalidRequest(
            f"tensor_parallel_size is {shard.world}, but {len(sharers)} ranks cannot share {group} heads",
            param="tensor_parallel_size",
        )
    q = split_range(group, Shard(sharers.index(shard.rank), len(sharers)))
    return range(head, head + 1), range(head * group + q.start, head * group + q.stop)


def split_range(size: int, shard: Shard) -> range:
    """Parts differ by one at most, larger ones first."""
    each, rest = divmod(size, shard.world)
    start = shard.rank * each + min(shard.rank, rest)
    return range(start, start + each + (shard.rank < rest))
