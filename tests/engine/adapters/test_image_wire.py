"""What describes an image crosses as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.adapters.host_memory import HostArena
from engine.adapters.image import ImageFormat
from engine.adapters.image_wire import decode_form, decode_image, encode_form, encode_image
from engine.sharding import Shard
from tests.engine.adapters.adapter_dirs import BASE_T, FORMAT, PAGE_ELEMS, load, write_adapter


@pytest.mark.parametrize(
    "form",
    [
        FORMAT,
        ImageFormat(BASE_T, PAGE_ELEMS, torch.bfloat16, 8, 3, 1 << 40, None, Shard(1, 2), True),
    ],
)
def test_a_format_crosses_without_its_arena(form: ImageFormat) -> None:
    arena = HostArena(form.page_elems, form.dtype)
    assert decode_form(json.loads(json.dumps(encode_form(replace(form, arena=arena))))) == form


def test_an_image_crosses_without_its_pages(tmp_path: Path) -> None:
    image = load(write_adapter(tmp_path / "a", files={"chat_template.jinja": "{{ messages }}"}))
    image = replace(image, is_from_disk=True)
    header, content = encode_image(image)
    got = decode_image(json.loads(json.dumps(header)), content, image.pages)
    assert got.pages is image.pages
    for name in ("digest", "report", "chat_template", "is_from_disk"):
        assert getattr(got, name) == getattr(image, name)
    for name in ("tile_offsets", "ranks", "scales"):
        assert torch.equal(getattr(got, name), getattr(image, name))
        assert getattr(got, name).dtype == getattr(image, name).dtype
    got.ranks.zero_()  # of its own
    assert int(image.ranks.max()) == 8
