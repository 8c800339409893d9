"""Images and their format between processes: JSON, and tensors as they are; the pages are shared memory."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from engine.adapters.host_memory import HostPages
from engine.adapters.image import AdapterImage, ImageFormat
from engine.shape import ModelShape
from engine.sharding import Shard

_FACTS = ("digest", "report", "chat_template", "is_from_disk")
_TENSORS = ("tile_offsets", "ranks", "scales")


def encode_form(form: ImageFormat) -> dict[str, Any]:
    """All but where images lie."""
    return {
        "shape": asdict(form.shape),
        "page_elems": form.page_elems,
        "dtype": _name(form.dtype),
        "max_rank": form.max_rank,
        "max_pool_pages": form.max_pool_pages,
        "max_host_bytes": form.max_host_bytes,
        "shard": asdict(form.shard),
        "is_fully_sharded": form.is_fully_sharded,
    }


def decode_form(data: dict[str, Any]) -> ImageFormat:
    shape, dtype, shard = ModelShape(**data["shape"]), _dtype(data["dtype"]), Shard(**data["shard"])
    return ImageFormat(**(data | {"shape": shape, "dtype": dtype, "shard": shard}))


def encode_image(image: AdapterImage) -> tuple[dict[str, Any], bytes]:
    """All but its pages: what describes it, and its tensors' bytes, one after the other."""
    tensors = [getattr(image, name) for name in _TENSORS]
    header = {name: getattr(image, name) for name in _FACTS}
    header["tensors"] = [[_name(tensor.dtype), *tensor.shape] for tensor in tensors]
    return header, b"".join(tensor.numpy().tobytes() for tensor in tensors)


def decode_image(header: dict[str, Any], content: bytes, pages: HostPages) -> AdapterImage:
    buffer = bytearray(content)  # of their own: tensors are writable
    tensors: dict[str, Any] = {}
    start = 0
    for name, (dtype, *shape) in zip(_TENSORS, header["tensors"], strict=True):
        count = math.prod(shape)
        tensors[name] = torch.frombuffer(buffer, dtype=_dtype(dtype), count=count, offset=start).view(shape)
        start += tensors[name].nbytes
    assert start == len(buffer)
    return AdapterImage(pages=pages, **{name: header[name] for name in _FACTS}, **tensors)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
