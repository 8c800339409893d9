from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine.adapters.safetensors_header import TensorEntry, parse_header
from engine.errors import AdapterRefused
from tests.engine.adapters.adapter_dirs import fill


def parse(header: Any, data_bytes: int) -> list[TensorEntry]:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(content, 8 + len(content) + data_bytes)


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_entries_point_at_the_bytes_that_safetensors_wrote() -> None:
    tensors = {
        f"t{i}": fill(f"t{i}", (i + 1, 3), dtype) for i, dtype in enumerate((torch.float32, torch.float16))
    }
    file = save(tensors, metadata={"format": "pt"})
    length = int.from_bytes(file[:8], "little")
    entries = parse_header(file[8 : 8 + length], len(file))
    assert [e.name for e in entries] == ["t0", "t1"]
    for e in entries:
        content = torch.frombuffer(bytearray(file[e.start : e.stop]), dtype=tensors[e.name].dtype)
        assert torch.equal(content.view(e.shape), tensors[e.name])


def test_a_header_without_tensors_is_empty() -> None:
    assert parse({"__metadata__": {"format": "pt"}}, 0) == []


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        (b"{", 0), (b"[]", 0), (b"\xff", 0), (b"[" * 100_000, 0),
        ({"a": entry()}, 23), ({"a": entry()}, 25), ({"a": entry()}, 0),
        ({"a": entry(offsets=[1, 25])}, 25),
        ({"a": entry(), "b": entry()}, 24),
        ({"a": entry(), "b": entry(offsets=[23, 47])}, 47),
        ({"a": entry(), "b": entry(offsets=[25, 49])}, 49),
        ({"a": entry(shape=[2, 4])}, 24), ({"a": entry(shape=[-2, -3])}, 24),
        ({"a": entry(shape=[2.0, 3])}, 24), ({"a": entry(shape=[True, 6])}, 24),
        ({"a": entry(shape="23")}, 24), ({"a": entry(shape=[1] * 9)}, 4),
        ({"a": entry(shape=[1 << 60, 1 << 60])}, 24),
        ({"a": entry(offsets=[0])}, 24), ({"a": entry(offsets=[24, 0])}, 24),
        ({"a": entry(offsets=None)}, 24), ({"a": 3}, 24), ({"a" * 600: entry()}, 24),
        ({"\ud800": entry()}, 24), ({"a\nb": entry()}, 24), ({"\ud800": 3}, 24),
    ],
)  # fmt: skip
def test_a_malformed_header_is_refused_with_the_files_name(header: Any, data_bytes: int) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse(header, data_bytes)
    assert caught.value.param == "adapter_model.safetensors"
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("dtype", ["F8_E4M3", "X" * 9999, None, ["F32"]])
def test_an_unknown_type_is_refused_with_the_tensors_name(dtype: Any) -> None:
    with pytest.raises(AdapterRefused) as caught:
        parse({"a": entry(dtype=dtype)}, 24)
    assert caught.value.param == "a"
    assert len(caught.value.message) < 200


def test_no_damage_to_a_header_gets_past_the_checks() -> None:
    """Any accepted header describes tensors inside the file, without overlaps."""
    rng = random.Random(1)
    file = save({"a": fill("a", (4, 4)), "b": fill("b", (8,))})
    length = int.from_bytes(file[:8], "little")
    num_accepted = 0
    for _ in range(2000):
        header = bytearray(file[8 : 8 + length])
        for _ in range(rng.randint(1, 3)):
            header[rng.randrange(len(header))] = rng.choice(b'0123456789{}[],:" ab')
        try:
            entries = parse_header(bytes(header), len(file))
        except AdapterRefused:
            continue
        num_accepted += 1
        end = 8 + length
        for e in sorted(entries, key=lambda e: e.start):
            assert e.start == end
            end = e.stop
        assert end == len(file)
    assert num_accepted > 0
