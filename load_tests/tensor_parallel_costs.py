"""What a decode step of a tensor-parallel group takes, by arithmetic.

    python -m load_tests.tensor_parallel_costs

For Llama-3-8B and -70B in bf16, 64 rows with 64 distinct all-linear adapters, context 1024, whole A of
column-split and whole B of row-split projections on every rank ("replicate"), against all of them split
("full", S-LoRA's scheme: 4 to 7 more collectives a layer, counted as 5).

    step = bytes of base, adapters and KV on a rank / 4.4 TB/s + collectives x (latency + bytes / link)

Latency: 10 us (a sum of one row on two H200 took 10.6 us), half as much again each time N doubles. Links:
NVLink 400 GB/s, PCIe 5 50 GB/s. Writes load_tests/results/tp_costs.md.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from engine.shape import NUM_PROJECTIONS, ModelShape
from engine.sharding import Shard, ShardedShape, shard_shape

MODELS = {
    "8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
}
SIZES = (1, 2, 4, 8, 16)
RANKS = (8, 16, 64, 256)
ROWS, CONTEXT, ITEM = 64, 1024, 2
READ_BYTES_PER_S = 4.4e12
LATENCY_S = 10e-6
LINKS = {"NVLink": 400e9, "PCIe": 50e9}
MORE_COLLECTIVES = 5
OUT = Path(__file__).parent / "results" / "tp_costs.md"


def base_bytes(sharded: ShardedShape) -> int:
    local = sharded.local
    linears = sum(math.prod(local.widths(p)) for p in range(NUM_PROJECTIONS))
    return ITEM * (local.num_layers * linears + len(sharded.vocab) * local.hidden_size)


def adapter_bytes(sharded: ShardedShape, rank: int) -> int:
    """Of one adapter: a whole side, and a part of the other."""
    local = sharded.local
    return ITEM * local.num_layers * rank * sum(sum(local.widths(p)) for p in range(NUM_PROJECTIONS))


def kv_bytes(sharded: ShardedShape) -> int:
    return ITEM * sharded.local.page_elems(CONTEXT) * ROWS


def collective_s(num_ranks: int, num_bytes: float, link: float) -> float:
    if num_ranks == 1:
        return 0.0
    latency = LATENCY_S * math.pow(1.5, math.log2(num_ranks) - 1)
    return latency + 2 * (num_ranks - 1) / num_ranks * num_bytes / link


def step_ms(model: ModelShape, num_ranks: int, rank: int, link: float, full: bool) -> float:
    sharded = shard_shape(model, Shard(0, num_ranks))
    whole = shard_shape(model, Shard(0, 1))
    lora = adapter_bytes(whole, rank) / num_ranks if full else adapter_bytes(sharded, rank)
    read = base_bytes(sharded) + ROWS * lora + kv_bytes(sharded)
    sums = 2 * collective_s(num_ranks, ROWS * model.hidden_size * ITEM, link)
    if full:
        sums += MORE_COLLECTIVES * collective_s(num_ranks, ROWS * rank * ITEM, link)
    return 1e3 * (read / READ_BYTES_PER_S + model.num_layers * sums)


def table(name: str, model: ModelShape) -> list[str]:
    lines = [
        f"## {name}",
        "",
        "| GPUs | rank | base, GiB a GPU | adapter, MiB a GPU (of whole) | sums a step | "
        "NVLink: replicate / full, ms | PCIe: replicate / full, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_ranks in SIZES:
        sharded = shard_shape(model, Shard(0, num_ranks))
        whole = shard_shape(model, Shard(0, 1))
        for rank in RANKS:
            part, all_of_it = adapter_bytes(sharded, rank), adapter_bytes(whole, rank)
            times = [
                " / ".join(f"{step_ms(model, num_ranks, rank, link, full):.1f}" for full in (False, True))
                for link in LINKS.values()
            ]
            cells = (
                str(num_ranks),
                str(rank),
                f"{base_bytes(sharded) / 2**30:.1f}",
                f"{part / 2**20:.0f} ({100 * part / all_of_it:.0f} %)",
                str(0 if num_ranks == 1 else 2 * model.num_layers),
                *times,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> int:
    assert __doc__ is not None
    text = [
        "# A group's decode step, by arithmetic",
        "",
        "Not measured.",
        "",
        "```",
        __doc__.strip(),
        "```",
        "",
    ]
    for name, model in MODELS.items():
        text += table(name, model)
    OUT.write_text("\n".join(text).rstrip() + "\n")
    sys.stdout.write(OUT.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
