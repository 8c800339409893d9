"""How fast an adapter's page image is built, on one core, beside plain copies of the same bytes.

    python -m load_tests.pack_bench [--core 1] [--ranks 16 64] [--out FILE.json]

All-linear adapters of Llama-3-8B shape become images in bf16. "recycled": into memory that was used before,
as PyTorch hands out pinned memory again; "fresh": into memory that the kernel must zero first. Best of many
rounds. Checks the image first; fails if bf16 is packed into recycled memory at less than 2 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.adapters.binding import module_name
from engine.adapters.checkpoint import AdapterCheckpoint, start_checkpoint
from engine.adapters.image import AdapterImage, ImageFormat, fill_pages, pack, plan_image
from engine.adapters.source import describe, open_reader, read_adapter_files
from engine.shape import NUM_PROJECTIONS, RANK_BLOCK, ModelShape

SHAPE = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
FORMAT = ImageFormat(SHAPE, SHAPE.page_elems(16), torch.bfloat16, max_rank=256)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MUST = 2e9  # bytes of image a second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    records = [measure(rank, name, args.rounds) for rank in args.ranks for name in DTYPES]
    for record in records:
        print(
            "rank {rank:3} from {source}: {image_mib:.0f} MiB in {pack_ms:.1f} ms recycled, "
            "{fresh_ms:.1f} fresh; image GB/s {pack:.2f} recycled, {fresh:.2f} fresh; "
            "source GB/s {from_source:.2f}; "
            "memcpy of the image {memcpy:.2f} recycled, {memcpy_fresh:.2f} fresh".format(**record)
        )
    if args.out:
        args.out.write_text(json.dumps(records, indent=1) + "\n")
    return 0 if all(r["pack"] * 1e9 >= MUST for r in records if r["source"] == "bf16") else 1


def measure(rank: int, source: str, rounds: int) -> dict[str, Any]:
    checkpoint = random_checkpoint(rank, DTYPES[source])
    image = pack(checkpoint, FORMAT)
    check(image, checkpoint)
    plan = plan_image(FORMAT, checkpoint.modules)
    recycled = best(lambda: fill_pages(checkpoint, plan, image.pages), rounds)
    fresh = best(lambda: pack(checkpoint, FORMAT), rounds)
    pages = torch.cat(list(image.pages))
    other = torch.empty_like(pages)
    memcpy = best(lambda: other.copy_(pages), rounds)
    memcpy_fresh = best(lambda: pages.clone(), rounds)
    return {
        "rank": rank,
        "source": source,
        "image_mib": image.nbytes / (1 << 20),
        "pack_ms": recycled * 1e3,
        "fresh_ms": fresh * 1e3,
        "pack": image.nbytes / recycled / 1e9,
        "fresh": image.nbytes / fresh / 1e9,
        "from_source": len(checkpoint.weights.buffer) / recycled / 1e9,
        "memcpy": image.nbytes / memcpy / 1e9,
        "memcpy_fresh": image.nbytes / memcpy_fresh / 1e9,
    }


def random_checkpoint(rank: int, dtype: torch.dtype) -> AdapterCheckpoint:
    with tempfile.TemporaryDirectory() as path:
        write_random_adapter(path, rank, dtype)
        with start_checkpoint(read_adapter_files(open_reader(describe(path))), SHAPE, rank) as checkpoint:
            checkpoint.weights.sha256()
            return checkpoint


def write_random_adapter(path: str, rank: int, dtype: torch.dtype) -> None:
    """All-linear, for SHAPE."""
    tensors = {}
    for layer in range(SHAPE.num_layers):
        for projection in range(NUM_PROJECTIONS):
            name = f"base_model.model.{module_name(layer, projection)}"
            widths = SHAPE.widths(projection)
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, widths.in_features).to(dtype)
            tensors[f"{name}.lora_B.weight"] = torch.randn(widths.out_features, rank).to(dtype)
    save_file(tensors, f"{path}/adapter_model.safetensors")
    Path(path, "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))


def check(image: AdapterImage, checkpoint: AdapterCheckpoint) -> None:
    elements = torch.cat(list(image.pages))
    for module in checkpoint.modules:
        sides = (checkpoint.tensor(module.lora_a), checkpoint.tensor(module.lora_b).T)
        for side, tensor in enumerate(sides):
            for block, rows in enumerate(torch.split(tensor, RANK_BLOCK)):
                offset = int(image.tile_offsets[module.layer, module.projection, side, block])
                got = elements[offset : offset + rows.numel()].view(rows.shape)
                assert torch.equal(got, rows.to(got.dtype)), module.name


def best(function: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round: the others were disturbed."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
