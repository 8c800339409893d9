"""Loads through the disk cache, from the fake S3 to the image."""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.adapters.disk_cache import DiskCache
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.image import AdapterImage
from engine.adapters.loader import AdapterLoader, LoadResult
from engine.adapters.loading import load_image
from engine.adapters.source import describe
from engine.config import EngineConfig
from engine.errors import InvalidRequest, LorafleetError, ModelNotFound
from engine.request import AdapterRef
from tests.engine.adapters import full_volume
from tests.engine.adapters.adapter_dirs import FORMAT, all_elements, load, write_adapter
from tests.engine.adapters.fake_s3 import FakeS3, serve

URI = "s3://models/sql"
WEIGHTS = "sql/adapter_model.safetensors"
WAIT_S = 20.0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    fake = FakeS3()
    path = write_adapter(tmp_path / "sql", files={"tokenizer_config.json": '{"chat_template": "x"}'})
    for file in path.iterdir():
        fake.objects[f"sql/{file.name}"] = file.read_bytes()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serve(fake) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        yield fake


class Disk:
    """Loads, and waits until what was read is on disk."""

    def __init__(self, root: Path) -> None:
        self.cache = DiskCache(str(root), 1 << 30)

    def load(self, version: str, uri: str = URI) -> AdapterImage:
        writer = DiskWriter(self.cache, max_pending=4)
        try:
            return load_image(uri, FORMAT, version=version, disk=writer)
        finally:
            writer.close()

    @property
    def weights(self) -> list[Path]:
        return list(self.cache._entries.glob("*/adapter_model.safetensors"))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "disk")


def assert_same(first: AdapterImage, second: AdapterImage) -> None:
    assert first.digest == second.digest
    assert first.report == second.report
    assert first.chat_template == second.chat_template == "x"
    assert torch.equal(all_elements(first), all_elements(second))


def test_the_second_load_asks_the_source_nothing(fake: FakeS3, disk: Disk) -> None:
    version = describe(URI).version
    first = disk.load(version)
    assert_same(first, load(URI))
    fake.requests.clear()
    fake.fail("status", status=503)
    assert_same(first, disk.load(version))
    assert fake.requests == []


def test_another_version_is_read_from_the_source(fake: FakeS3, disk: Disk, tmp_path: Path) -> None:
    """FR-22."""
    old = describe(URI).version
    first = disk.load(old)
    path = write_adapter(tmp_path / "new", config={"peft_type": "LORA", "r": 8, "lora_alpha": 1})
    fake.objects["sql/adapter_config.json"] = (path / "adapter_config.json").read_bytes()
    assert disk.load(describe(URI).version).digest != first.digest
    assert disk.load(old).digest == first.digest


@pytest.mark.parametrize("position", [0, 9, 500, -1])
def test_a_bit_that_flipped_on_disk_is_found_and_the_source_is_read(
    position: int, fake: FakeS3, disk: Disk
) -> None:
    """FR-63."""
    version = describe(URI).version
    first = disk.load(version)
    (weights,) = disk.weights
    content = bytearray(weights.read_bytes())
    content[position] ^= 1
    weights.write_bytes(content)
    before = fake.keys_got.count(WEIGHTS)
    assert_same(first, disk.load(version))
    assert fake.keys_got.count(WEIGHTS) == before + 1
    (weights,) = disk.weights
    assert weights.read_bytes() == fake.objects[WEIGHTS]


def test_a_full_volume_stops_no_load(
    fake: FakeS3, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-69: what is served does not need the disk; the log says why nothing is kept."""

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert_same(disk.load(describe(URI).version), load(URI))
    assert "adapter 'sql' is not kept on disk: No space left on device" in caplog.text
    assert list(disk.cache._tmp.iterdir()) == []
    assert disk.weights == []


UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


def can_mount() -> bool:
    command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.cluster
@pytest.mark.usefixtures("fake")
@pytest.mark.skipif(not can_mount(), reason="needs user namespaces, to mount a small volume")
def test_a_real_volume_that_others_fill_to_the_last_byte(tmp_path: Path) -> None:
    """FR-69: room is made of what is not being read; with none left loads go on, and nothing lies about."""
    command = f"{sys.executable} -m {full_volume.__name__} {tmp_path} {URI}"
    script = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {command}"
    done = subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no room in disk_cache_dir" in done.stderr


def test_a_volume_that_is_full_at_the_start_leaves_the_engine_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-69."""

    def no_space(path: Path, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", no_space)
    config = EngineConfig(model="unused", disk_cache_dir=str(tmp_path / "disk"))
    AdapterLoader(FORMAT, config, lambda result: None).close()
    assert "nothing is kept in disk_cache_dir: No space left on device" in caplog.text


def test_what_is_refused_is_not_kept(fake: FakeS3, disk: Disk) -> None:
    fake.objects[WEIGHTS] = fake.objects[WEIGHTS][:-1]
    with pytest.raises(LorafleetError):
        disk.load(describe(URI).version)
    assert disk.weights == []


@pytest.mark.usefixtures("fake")
def test_directories_are_not_copied(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "sql")
    disk.load(describe(path).version, path)
    assert disk.weights == []


def test_a_loader_keeps_what_it_read_and_closes_its_writer(fake: FakeS3, disk: Disk, tmp_path: Path) -> None:
    config = EngineConfig(model="unused", disk_cache_dir=str(tmp_path / "disk"))
    results: queue.Queue[LoadResult] = queue.Queue()
    ref = AdapterRef("sql", URI, describe(URI).version)
    for _ in range(2):
        loader = AdapterLoader(FORMAT, config, results.put)
        loader.submit(ref)
        image = results.get(timeout=WAIT_S).image
        assert image is not None
        loader.close()
        assert len(disk.weights) == 1
        fake.fail("status", status=404, code="NoSuchKey")
    loader = AdapterLoader(FORMAT, config, results.put)
    loader.submit(AdapterRef("sql", URI, "other version"))
    assert isinstance(results.get(timeout=WAIT_S).error, ModelNotFound)
    loader.close()


def test_a_directory_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = EngineConfig(model="unused", disk_cache_dir=str(tmp_path / "file" / "disk"))
    with pytest.raises(InvalidRequest) as caught:
        AdapterLoader(FORMAT, config, lambda result: None)
    assert caught.value.param == "disk_cache_dir"
