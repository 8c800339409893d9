"""Adapter directories for tests: the base model T, tensors filled from their names, tiles read back."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loading import load_image
from engine.shape import PROJECTIONS, RANK_BLOCK, ModelShape

BASE_T = ModelShape(
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
)
PAGE_ELEMS = BASE_T.page_elems(BASE_T.fit_page_tokens(16))
FORMAT = ImageFormat(BASE_T, PAGE_ELEMS, torch.float32, max_rank=256)

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj"],
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Tensors = dict[str, torch.Tensor]


def fill(name: str, shape: Iterable[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(tuple(shape), generator=generator) * 0.05).to(dtype)


def tensor_name(layer: int, projection: str, side: str) -> str:
    block = "mlp" if projection in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{side}.weight"


def lora_tensors(
    shape: ModelShape = BASE_T,
    rank: int = 8,
    projections: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensors:
    tensors = {}
    for layer in range(shape.num_layers) if layers is None else layers:
        for projection in projections:
            in_features, out_features = shape.widths(PROJECTIONS.index(projection))
            for side, size in (("A", (rank, in_features)), ("B", (out_features, rank))):
                name = tensor_name(layer, projection, side)
                tensors[name] = fill(name, size, dtype)
    return tensors


def write_adapter(
    path: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    config: Mapping[str, Any] | str | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = CONFIG if config is None else config
    (path / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file(dict(lora_tensors() if tensors is None else tensors), path / "adapter_model.safetensors")
    for name, content in (files or {}).items():
        (path / name).write_text(content)
    return path


def write_sums(path: Path) -> None:
    files = sorted(file for file in path.iterdir() if file.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (path / "SHA256SUMS").write_text("".join(lines))


def load(
    path: Path | str,
    shape: ModelShape = BASE_T,
    page_elems: int = PAGE_ELEMS,
    dtype: torch.dtype = torch.float32,
    max_rank: int = 256,
) -> AdapterImage:
    return load_image(str(path), ImageFormat(shape, page_elems, dtype, max_rank))


def all_elements(image: AdapterImage) -> torch.Tensor:
    """A copy, page after page."""
    return torch.cat(list(image.pages))


def unpack(image: AdapterImage, shape: ModelShape, layer: int, projection: str) -> Tensors:
    """A [rank, in] and B [out, rank] of one module, read tile by tile as a kernel does."""
    index = PROJECTIONS.index(projection)
    rank = int(image.ranks[layer, index])
    elements = all_elements(image)
    sides = {}
    for side, width in enumerate(shape.widths(index)):
        tiles = []
        for block, row in enumerate(range(0, rank, RANK_BLOCK)):
            rows = min(RANK_BLOCK, rank - row)
            offset = int(image.tile_offsets[layer, index, side, block])
            tiles.append(elements[offset : offset + rows * width].view(rows, width))
        sides["AB"[side]] = torch.cat(tiles)
    return {"A": sides["A"], "B": sides["B"].T}
