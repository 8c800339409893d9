from __future__ import annotations

import itertools

import pytest

from engine.errors import InvalidRequest
from engine.shape import NUM_PROJECTIONS, PROJECTIONS, ModelShape
from engine.sharding import Shard, ShardedShape, shard_shape

LLAMA_8B = ModelShape(32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_70B = ModelShape(80, 8192, 28672, 64, 8, 128, 128256)
SMOL = ModelShape(30, 576, 1536, 9, 3, 64, 49152)
BASE_T = ModelShape(2, 64, 128, 4, 2, 16, 256)


def shards(shape: ModelShape, world: int) -> list[ShardedShape]:
    return [shard_shape(shape, Shard(rank, world)) for rank in range(world)]


@pytest.mark.parametrize("shape", [LLAMA_8B, LLAMA_70B, SMOL, BASE_T])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_parts_cover_every_weight_and_only_kv_heads_are_held_twice(shape: ModelShape, world: int) -> None:
    parts = shards(shape, world)
    for projection in range(NUM_PROJECTIONS):
        ranges = [(s.parts[projection].start, s.parts[projection].end) for s in parts]
        width = shape.widths(projection)
        whole = width.out_features if parts[0].parts[projection].by_output else width.in_features
        if PROJECTIONS[projection] in ("k_proj", "v_proj"):
            assert set(itertools.chain.from_iterable(range(*r) for r in ranges)) == set(range(whole))
        else:
            assert [0, *(end for _, end in ranges)] == [*(start for start, _ in ranges), whole]
    assert [row for s in parts for row in s.vocab] == list(range(shape.vocab_size))


@pytest.mark.parametrize("shape", [LLAMA_8B, SMOL, BASE_T])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_ranks_query_heads_find_their_kv_heads_there(shape: ModelShape, world: int) -> None:
    group = shape.num_heads // shape.num_kv_heads
    for s in shards(shape, world):
        q, k = s.parts[0], s.parts[1]
        heads = range(q.start // shape.head_dim, q.end // shape.head_dim)
        kv_heads = range(k.start // shape.head_dim, k.end // shape.head_dim)
        assert {head // group for head in heads} == set(kv_heads)
        assert len(heads) % len(kv_heads) == 0
        assert s.local.widths(0) == (shape.hidden_size, len(heads) * shape.head_dim)
        assert s.local.widths(3) == (len(heads) * shape.head_dim, shape.hidden_size)


def test_more_ranks_than_kv_heads_replicate_them() -> None:
    """FR-38: 4 ranks of base T hold 48 fused rows each (16 + 16 + 16), not 32."""
    for s in shards(BASE_T, 4):
        assert s.local.q_size + 2 * s.local.kv_size == 48
    assert [s.parts[1].start for s in shards(BASE_T, 4)] == [0, 0, 16, 16]


def test_parts_differ_by_one_head_or_block_at_most() -> None:
    parts = shards(SMOL, 2)
    assert [s.local.num_kv_heads for s in parts] == [2, 1]
    assert [s.local.num_heads for s in parts] == [6, 3]
    assert {s.local.intermediate_size for s in parts} == {768}


def test_one_rank_holds_everything() -> None:
    (whole,) = shards(LLAMA_8B, 1)
    assert whole.local == LLAMA_8B


@pytest.mark.parametrize("world", [5, 64])
def test_too_many_ranks_are_refused(world: int) -> None:
    with pytest.raises(InvalidRequest) as error:
        shards(BASE_T, world)
    assert error.value.param == "tensor_parallel_size"
