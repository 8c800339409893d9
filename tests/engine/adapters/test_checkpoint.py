from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.checkpoint import AdapterCheckpoint, start_checkpoint
from engine.adapters.directory import DirectoryFolder
from engine.adapters.files import AdapterFile, AdapterListing, Folder
from engine.adapters.reader import FileReader
from engine.adapters.source import describe, open_reader, read_adapter_files
from engine.errors import AdapterRefused
from tests.engine.adapters.adapter_dirs import BASE_T, CONFIG, lora_tensors, tensor_name, write_adapter


class CountingFolder:
    parallel_reads = 1

    def __init__(self, inner: Folder) -> None:
        self.inner = inner
        self.num_bytes = 0

    def list_files(self) -> AdapterListing:
        return self.inner.list_files()

    def read(self, file: AdapterFile, offset: int, view: memoryview, check: Callable[[], None]) -> None:
        self.num_bytes += len(view)
        self.inner.read(file, offset, view, check)


def checkpoint(path: Path) -> AdapterCheckpoint:
    return start_checkpoint(read_adapter_files(open_reader(describe(str(path)))), BASE_T, max_rank=256)


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    loaded = checkpoint(write_adapter(tmp_path / "a"))
    tensor = loaded.tensor(loaded.modules[0].lora_a)
    assert torch.equal(tensor, lora_tensors()[tensor_name(0, "q_proj", "A")])
    start = loaded.modules[0].lora_a.start
    loaded.weights.buffer[start:] = bytes(len(loaded.weights.buffer) - start)
    assert not tensor.any()


def test_the_same_content_has_the_same_digest_wherever_it_is(tmp_path: Path) -> None:
    """FR-22: a reload of identical bytes is the same adapter."""
    first = write_adapter(tmp_path / "a", files={"chat_template.jinja": "x", "README.md": "1"})
    second = tmp_path / "b"
    shutil.copytree(first, second)
    (second / "README.md").write_text("2")
    assert describe(str(first)).version != ""
    assert checkpoint(first).digest == checkpoint(second).digest


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 32},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 32}},
        {"alpha_pattern": {"q_proj": 32, "v_proj": 1}},
        {"alpha_pattern": {"v_proj": 1, "q_proj": 32}},
    ],
)
def test_another_scale_is_another_digest(change: dict[str, Any], tmp_path: Path) -> None:
    """FR-22."""
    path = write_adapter(tmp_path / "a")
    before = checkpoint(path).digest
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | change))
    assert checkpoint(path).digest != before


def test_one_other_bit_or_chat_template_is_another_digest(tmp_path: Path) -> None:
    """FR-22."""
    path = write_adapter(tmp_path / "a")
    digests = [checkpoint(path).digest]
    weights = bytearray((path / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "adapter_model.safetensors").write_bytes(weights)
    digests.append(checkpoint(path).digest)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    digests.append(checkpoint(path).digest)
    assert len(set(digests)) == 3
    assert all(len(digest) == 64 for digest in digests)


def test_what_does_not_change_an_answer_does_not_change_the_digest(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    before = checkpoint(path).digest
    changed = CONFIG | {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.5}
    (path / "adapter_config.json").write_text(json.dumps(changed, indent=4))
    assert checkpoint(path).digest == before


def test_the_names_are_checked_before_the_weights_are_read(tmp_path: Path) -> None:
    """FR-20: a bad adapter costs its header, not its bytes."""
    tensors = lora_tensors() | {"x" * 100: torch.zeros(2 << 20)}  # 8 MiB
    path = write_adapter(tmp_path / "a", tensors)
    folder = CountingFolder(DirectoryFolder(path))
    files = read_adapter_files(FileReader(folder, folder.list_files()))
    folder.num_bytes = 0
    with pytest.raises(AdapterRefused):
        start_checkpoint(files, BASE_T, max_rank=256)
    assert folder.num_bytes == 1 << 20


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 8 + b"{}", b"PK\x03\x04" + b"\0" * 100]
)
def test_a_file_that_is_no_safetensors_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(AdapterRefused) as caught:
        checkpoint(path)
    assert caught.value.param == "adapter_model.safetensors"


@pytest.mark.parametrize("keep", [9, 100, 5000, -1])
def test_a_truncated_file_is_found_by_its_length(keep: int, tmp_path: Path) -> None:
    """FR-63."""
    path = write_adapter(tmp_path / "a")
    weights = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(weights[:keep])
    with pytest.raises(AdapterRefused) as caught:
        checkpoint(path)
    assert caught.value.param == "adapter_model.safetensors"


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    before = checkpoint(path)
    weights = (path / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    padding = b" " * (1 << 20)
    longer = (length + len(padding)).to_bytes(8, "little") + weights[8 : 8 + length] + padding
    (path / "adapter_model.safetensors").write_bytes(longer + weights[8 + length :])
    after = checkpoint(path)
    entry = after.modules[1].lora_b
    assert torch.equal(after.tensor(entry), before.tensor(before.modules[1].lora_b))


def test_added_tokens_beyond_the_base_vocabulary_are_refused(tmp_path: Path) -> None:
    """FR-57: no matrix has a row for them."""
    path = write_adapter(tmp_path / "a", files={"added_tokens.json": '{"<tool>": 256, "<pad>": 3}'})
    with pytest.raises(AdapterRefused) as caught:
        checkpoint(path)
    assert caught.value.param == "added_tokens"
    assert "<tool>" in caught.value.message
    (path / "added_tokens.json").write_text('{"<pad>": 255}')
    checkpoint(path)


def test_warnings_of_config_and_tensors_are_kept(tmp_path: Path) -> None:
    config = CONFIG | {"task_type": "SEQ_CLS", "target_modules": ["q_proj", "v_proj", "o_proj"]}
    warnings = checkpoint(write_adapter(tmp_path / "a", config=config)).warnings
    assert len(warnings) == 2
