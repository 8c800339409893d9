"""What a decode step of a tensor-parallel group takes, by arithmetic.

    python -m load_tests.tensor_parallel_costs

For Llama-3-8B and -70B in bf16, 64 rows with 64 distinct all-linear adapters, context 1024: whole A of
column-split and whole B of row-split projections on every rank ("replicate"), against 1/N of every adapter
on each ("full": four small collectives a layer more). The arithmetic is engine/tensor_parallel/costs.py, by
which an engine with lora_sharding = auto chooses.

    step = bytes of base, adapters and KV on a rank / 4.4 TB/s + collectives x (latency + bytes sent / link)

NVLink: GPUs share memory, and send each other what belongs together; 400 GB/s, a sum of two ranks 3.4 us, an
exchange between A and B 1 us. NCCL: all else, over 50 GB/s; a sum 8 us, an exchange 32. Half as much again
each time N doubles. engine/tensor_parallel/costs.py says which of these were measured. Writes
load_tests/results/tp_costs.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.shape import ModelShape
from engine.tensor_parallel.costs import NCCL, NVLINK, Batch, GroupCost

MODELS = {
    "8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
}
SIZES = (1, 2, 4, 8, 16)
RANKS = (8, 16, 64, 256)
ROWS, CONTEXT, ITEM_BYTES = 64, 1024, 2
OUT = Path(__file__).parent / "results" / "tp_costs.md"


def table(name: str, model: ModelShape) -> list[str]:
    lines = [
        f"## {name}",
        "",
        "| GPUs | rank | base, GiB a GPU | adapter, MiB a GPU: replicate / full | sums a step | "
        "NVLink: replicate / full, ms | NCCL: replicate / full, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for num_ranks in SIZES:
        groups = [GroupCost.of(model, num_ranks, sharding, ITEM_BYTES) for sharding in ("replicate", "full")]
        for rank in RANKS:
            batch = Batch(ROWS, rank, CONTEXT)
            times = [
                " / ".join(f"{1e3 * group.step_s(batch, machine):.1f}" for group in groups)
                for machine in (NVLINK, NCCL)
            ]
            cells = (
                str(num_ranks),
                str(rank),
                f"{groups[0].base_bytes / 2**30:.1f}",
                " / ".join(f"{group.adapter_bytes(rank) / 2**20:.0f}" for group in groups),
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
        "Measured on two H200: [h200_tp2.md](h200_tp2.md), [h200_tp2_shardings.md](h200_tp2_shardings.md);",
        "on one in the place of two: [h200_tp2_loopback_shardings.md](h200_tp2_loopback_shardings.md).",
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
