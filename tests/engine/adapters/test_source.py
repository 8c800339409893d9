from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.adapters.directory import DirectorySource
from engine.adapters.files import SourceChanged
from engine.adapters.source import describe, open_reader, open_source, read_adapter_files, read_one_version
from engine.errors import AdapterRefused, InvalidRequest, ModelNotFound, Unavailable
from tests.engine.adapters.adapter_dirs import BASE_T, load, lora_tensors, tensor_name, unpack, write_adapter


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def write_pickle(path: Path, content: object) -> None:
    path.write_bytes(pickle.dumps(content))


def test_a_pickle_alone_is_refused_and_never_opened(tmp_path: Path) -> None:
    """FR-18."""
    path = write_adapter(tmp_path / "a")
    (path / "adapter_model.safetensors").unlink()
    write_pickle(path / "adapter_model.bin", Bomb(tmp_path / "marker"))
    with pytest.raises(AdapterRefused) as caught:
        load(path)
    assert caught.value.status == 400
    assert caught.value.param == "adapter_model.bin"
    assert "adapter_model.bin" in caught.value.message
    assert not (tmp_path / "marker").exists()


def test_safetensors_are_read_where_both_formats_are(tmp_path: Path) -> None:
    """FR-18: and the training leftovers beside them are not."""
    path = write_adapter(tmp_path / "a")
    for name in ("adapter_model.bin", "training_args.bin", "optimizer.pt"):
        write_pickle(path / name, Bomb(tmp_path / "marker"))
    got = unpack(load(path), BASE_T, 1, "q_proj")["A"]
    assert torch.equal(got, lora_tensors()[tensor_name(1, "q_proj", "A")])
    assert not (tmp_path / "marker").exists()


def test_an_adapter_without_weights_is_refused_with_the_files_name(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterRefused) as caught:
        read_adapter_files(open_reader(describe(str(path))))
    assert caught.value.param == "adapter_model.safetensors"


def test_a_huge_config_is_refused_unread(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", config=" " * ((1 << 20) + 1))
    with pytest.raises(AdapterRefused) as caught:
        load(path)
    assert caught.value.param == "adapter_config.json"


def test_an_adapter_is_described_by_its_own_uri(tmp_path: Path) -> None:
    write_adapter(tmp_path / "root" / "a")
    listing = describe(str(tmp_path / "root" / "a") + "/")
    assert listing.name == "a"
    assert listing == open_source(str(tmp_path / "root")).find("a")
    assert isinstance(open_source(str(tmp_path)), DirectorySource)


def test_where_nothing_is_nothing_is_found_and_no_path_is_told(tmp_path: Path) -> None:
    """FR-26, FR-30."""
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelNotFound) as caught:
            describe(str(path))
        assert caught.value.status == 404
        assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("uri", ["", "gs://bucket/a", "https://host/a", "file:///a", "a\0b", "a\nb"])
def test_a_uri_of_another_kind_is_a_400(uri: str) -> None:
    """FR-64."""
    for call in (describe, open_source):
        with pytest.raises(InvalidRequest) as caught:
            call(uri)
        assert caught.value.param == "uri"


def test_a_directory_source_does_not_import_boto3() -> None:
    code = "import sys, engine.adapters.loader; sys.exit('boto3' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_that_keep_changing_are_a_503() -> None:
    """FR-22: read twice, then given up."""
    reads = []

    def read() -> None:
        reads.append(1)
        raise SourceChanged

    with pytest.raises(Unavailable) as caught:
        read_one_version(read)
    assert caught.value.retry_after_s is not None
    assert len(reads) == 2
