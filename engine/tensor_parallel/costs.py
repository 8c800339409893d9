"""What a decode step of a group takes, by arithmetic, and so how its adapters are to be sharded.

    step = bytes of base, adapters and KV on a rank / read rate + collectives x (latency + bytes / link)

"replicate" takes two sums a layer. "full" takes four exchanges more, of what lies between A and B, and reads
1/N of each adapter. If only one of them lets a batch's adapters and KV fit the pool, it is taken, else
the one that takes less time. Plain arithmetic: no torch, no device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from engine.adapters.layout import num_elements
from engine.shape import NUM_PROJECTIONS, ModelShape
from engine.sharding import AdapterShard, Shard, shard_adapters

Sharding = Literal["replicate", "full"]

_HIDDEN_ITEM_BYTES = 4  # of what lies between A and B
# all-gathers for q k v and for gate up, reduce-scatters for o and for down
_EXCHANGES_A_LAYER = 4
_SUMS_A_LAYER = 2
_MORE_RANKS = 1.5  # a collective of twice the ranks takes so much longer to begin


@dataclass(frozen=True, slots=True)
class Machine:
    read_bytes_per_s: float  # of a rank's memory
    link_bytes_per_s: float  # from a rank to others
    # of two ranks
    sum_latency_s: float
    exchange_latency_s: float

    def collective_s(self, latency_s: float, num_ranks: int, sent_bytes: float) -> float:
        """`sent_bytes`: by each rank."""
        if num_ranks == 1:
            return 0.0
        latency = latency_s * math.pow(_MORE_RANKS, math.log2(num_ranks) - 1)
        return latency + sent_bytes / self.link_bytes_per_s


# One of two H200 reads 4.4 TB/s, and a sum of one row takes 3.4 us (load_tests/results/h200_tp2.md). What
# ranks hand over (kernels.sgmv.handover) added nothing to a step of one H200 in the place of two, beside the
# bytes that "full" spares (h200_tp2_loopback_shardings.md); 1 us is for the link, where it was not measured.
NVLINK = Machine(4.4e12, 400e9, 3.4e-6, 1e-6)
# Where GPUs share no memory, over PCIe 5 or 400 Gb/s. By NCCL, over NVLink, a sum of one row takes 8 us. To a
# step of 64 rows of rank 16, 64, 256 each exchange added 18, 22, 32 us (h200_tp2_shardings.md): the last one
# counts, since only there the choice is close.
NCCL = Machine(4.4e12, 50e9, 8e-6, 32e-6)
# processes of one machine over gloo: a small collective of two takes 0.2 to 0.5 ms, 4 MiB take 5
LOCAL_CPUS = Machine(10e9, 1e9, 300e-6, 300e-6)


@dataclass(frozen=True, slots=True)
class Batch:
    rows: int  # running requests, each with an all-linear adapter of its own
    rank: int  # of each adapter, so that the batch's sum is rows x rank
    context: int  # tokens of each request


@dataclass(frozen=True, slots=True)
class GroupCost:
    """`part`: of the rank that holds most, which is the first."""

    part: AdapterShard
    item_bytes: int  # of weights and KV

    @classmethod
    def of(cls, model: ModelShape, num_ranks: int, sharding: Sharding, item_bytes: int) -> GroupCost:
        return cls(shard_adapters(model, Shard(0, num_ranks), sharding == "full"), item_bytes)

    @property
    def num_ranks(self) -> int:
        return self.part.sharded.shard.world

    @property
    def base_bytes(self) -> int:
        """Without the embedding, of which a step reads a few rows."""
        local = self.part.sharded.local
        linears = sum(math.prod(local.widths(p)) for p in range(NUM_PROJECTIONS))
        head = len(self.part.sharded.vocab) * local.hidden_size
        return self.item_bytes * (local.num_layers * linears + head)

    def adapter_bytes(self, rank: int) -> int:
        """Of one all-linear adapter."""
        local = self.part.sharded.local
        ranks = {(0, projection): rank for projection in range(NUM_PROJECTIONS)}
        return self.item_bytes * local.num_layers * num_elements(local, ranks, self.part.num_rows)

    def pool_bytes(self, batch: Batch) -> int:
        """What a batch takes of the pool."""
        kv = self.item_bytes * self.part.sharded.local.page_elems(batch.context)
        return batch.rows * (self.adapter_bytes(batch.rank) + kv)

    def step_s(self, batch: Batch, machine: Machine) -> float:
        layers = self.part.sharded.full.num_layers
        others = (self.num_ranks - 1) / self.num_ranks
        row_bytes = self.part.sharded.full.hidden_size * self.item_bytes
        sent = 2 * others * batch.rows * row_bytes
        collectives = _SUMS_A_LAYER * machine.collective_s(machine.sum_latency_s, self.num_ranks, sent)
        if self.part.is_full:
            sent = others * batch.rows * batch.rank * _HIDDEN_ITEM_BYTES * NUM_PROJECTIONS
            sent /= _EXCHANGES_A_LAYER
            exchange = machine.collective_s(machine.exchange_latency_s, self.num_ranks, sent)
            collectives += _EXCHANGES_A_LAYER * exchange
        return (self.base_bytes + self.pool_bytes(batch)) / machine.read_bytes_per_s + layers * collectives


def choose_sharding(
    model: ModelShape, num_ranks: int, batch: Batch, machine: Machine, item_bytes: int, pool_bytes: int
) -> Sharding:
    """`pool_bytes`: free for adapters and KV on a rank."""

    def cost(sharding: Sharding) -> tuple[bool, float]:
        group = GroupCost.of(model, num_ranks, sharding, item_bytes)
        return group.pool_bytes(batch) > pool_bytes, group.step_s(batch, machine)

    choices: tuple[Sharding, ...] = ("replicate", "full")
    return min(choices, key=cost)
