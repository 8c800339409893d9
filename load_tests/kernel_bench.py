"""What LoRA adds to the linears of one Llama-3-8B layer on one GPU, beside what it must stay under.

    python -m load_tests.kernel_bench [--out load_tests/results]

Writes h200_kernels.json and h200_kernels.md. How it measures: kernels/sgmv/bench.py. Fails if a result is
wrong or a figure is above its `must`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kernels.sgmv.bench import Result, measure_all
from load_tests.conditions import gpu_conditions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("load_tests/results"))
    args = parser.parse_args()

    results = []
    for result in measure_all():
        results.append(result)
        print(f"{result.case.name:50} {result.us:7.1f} us, must {result.case.must_us:g}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "h200_kernels.json").write_text(json.dumps(_records(results), indent=1) + "\n")
    (args.out / "h200_kernels.md").write_text(_markdown(results))
    return 0 if all(result.us <= result.case.must_us for result in results) else 1


def _conditions() -> str:
    known = ", ".join(gpu_conditions().values())
    return f"{known}, triton {version('triton')}, Llama-3-8B shapes, bf16, random weights"


def _records(results: Sequence[Result]) -> list[dict[str, Any]]:
    conditions = _conditions()
    return [
        {
            "case": result.case.name,
            "metric": "added to the base linears of a layer" if result.case.decode else "alone, a layer",
            "value": round(result.us, 2),
            "unit": "us",
            "must": result.case.must_us,
            "moonshot": result.case.moonshot_us,
            "base": round(result.base_us, 1),
            "floor": round(result.floor_us, 1),
            "error": round(result.error, 5),
            "conditions": f"{conditions}, graph of {result.num_layer_sets} layers",
        }
        for result in results
    ]


def _markdown(results: Sequence[Result]) -> str:
    lines = [
        "# LoRA on all seven projections of one layer",
        "",
        f"{_conditions()}. Written by `python -m load_tests.kernel_bench`; `kernels/sgmv/bench.py` says how.",
        "Added: a layer's four base GEMMs with LoRA minus without, in a CUDA graph. Floor: LoRA weights, x",
        "and y once at the measured read rate. `must` and `moonshot` are goals that were set beforehand.",
        "",
        "| tokens, adapters | us | must | moonshot | floor | of the floor | base |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        case, base = result.case, f"{result.base_us:.0f}" if result.base_us else ""
        lines.append(
            f"| {case.name} | {result.us:.1f} | {case.must_us:g} | {case.moonshot_us:g} "
            f"| {result.floor_us:.1f} | {result.us / result.floor_us:.2f} | {base} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
