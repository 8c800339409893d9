from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.adapters.directory import DirectoryFolder, DirectorySource
from engine.adapters.files import SourceChanged
from engine.errors import AccessDenied, InvalidRequest, LorafleetError, ModelNotFound, Unavailable
from tests.engine.adapters.adapter_dirs import write_adapter


def never() -> None:
    pass


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b", "a", "A.1"):
        write_adapter(tmp_path / "root" / name)
    (tmp_path / "root" / "no-adapter").mkdir()
    (tmp_path / "root" / "file").write_text("")
    write_adapter(tmp_path / "root" / "bad name")
    write_adapter(tmp_path / "root" / ".hidden")
    write_adapter(tmp_path / "outside")
    return tmp_path / "root"


def test_each_folder_with_a_config_is_an_adapter(root: Path) -> None:
    listings = DirectorySource(str(root)).list_adapters()
    assert [listing.name for listing in listings] == ["A.1", "a", "b"]
    assert listings[1] == DirectorySource(str(root)).find("a")
    assert listings[1].uri == str(root / "a")
    assert [file.name for file in listings[1].files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_files_that_are_not_needed_are_not_even_listed(root: Path) -> None:
    """FR-18."""
    before = DirectorySource(str(root)).find("a")
    for name in ("training_args.bin", "optimizer.pt", "README.md"):
        (root / "a" / name).write_text("x")
    (root / "a" / "checkpoint-10").mkdir()
    assert DirectorySource(str(root)).find("a") == before


def test_a_new_file_time_or_size_is_a_new_version(root: Path) -> None:
    source = DirectorySource(str(root))
    versions = {source.find("a").version}
    os.utime(root / "a" / "adapter_model.safetensors", ns=(1, 1))
    versions.add(source.find("a").version)
    with (root / "a" / "adapter_config.json").open("a") as file:
        file.write(" ")
    os.utime(root / "a" / "adapter_config.json", ns=(1, 1))
    versions.add(source.find("a").version)
    (root / "a" / "chat_template.jinja").write_text("x")
    versions.add(source.find("a").version)
    assert len(versions) == 4
    assert source.find("a").version in versions
    assert source.find("b").version != source.find("a").version


@pytest.mark.parametrize(
    "name", ["../outside", "..", "", ".", "/etc", "%2e%2e/outside", "a\0", "a\n", ".hidden"]
)
def test_a_name_outside_the_grammar_is_a_400(name: str, root: Path) -> None:
    """FR-30."""
    with pytest.raises(InvalidRequest) as caught:
        DirectorySource(str(root)).find(name)
    assert caught.value.status == 400
    assert str(root) not in caught.value.message


@pytest.mark.parametrize("name", ["absent", "no-adapter", "file"])
def test_what_is_no_adapter_is_not_found(name: str, root: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        DirectorySource(str(root)).find(name)
    assert str(root) not in caught.value.message
    assert name in caught.value.message


def test_a_file_that_is_written_over_in_place_is_listed_anew(root: Path) -> None:
    """The time of its directory stays as it was."""
    source = DirectorySource(str(root))
    before = source.list_adapters()
    directory = (root / "a").stat()
    with (root / "a" / "adapter_config.json").open("r+") as file:
        file.write("{ ")
    assert (root / "a").stat().st_mtime_ns == directory.st_mtime_ns
    changed = [new.name for new, old in zip(source.list_adapters(), before, strict=True) if new != old]
    assert changed == ["a"]


def test_a_listing_resolves_links_only(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of adapters are listed every few seconds, and to resolve a path takes many calls."""
    (root / "alias").symlink_to(root / "a")
    source = DirectorySource(str(root))
    resolved: list[str] = []
    realpath = os.path.realpath

    def note(path: Any) -> str:
        resolved.append(Path(path).name)
        return str(realpath(path))

    monkeypatch.setattr("os.path.realpath", note)
    assert len(source.list_adapters()) == 4
    assert set(resolved) == {"alias", "a"}


def test_a_link_out_of_the_root_is_neither_listed_nor_found(root: Path) -> None:
    """FR-30."""
    (root / "evil").symlink_to(root.parent / "outside")
    (root / "alias").symlink_to(root / "a")
    source = DirectorySource(str(root))
    assert [listing.name for listing in source.list_adapters()] == ["A.1", "a", "alias", "b"]
    with pytest.raises(ModelNotFound) as caught:
        source.find("evil")
    assert str(root.parent) not in caught.value.message


def test_a_link_in_an_adapter_to_another_ones_files_is_not_followed(root: Path) -> None:
    """FR-30: one tenant's directory must not serve another one's weights."""
    weights = root / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(root / "b" / "adapter_model.safetensors")
    assert DirectorySource(str(root)).find("a").find(weights.name) is None
    (root / "b" / "adapter_config.json").unlink()
    (root / "b" / "adapter_config.json").symlink_to(root / "a" / "adapter_config.json")
    with pytest.raises(ModelNotFound):
        DirectorySource(str(root)).find("b")


def test_a_link_in_circles_or_a_pipe_is_no_file(root: Path) -> None:
    (root / "a" / "chat_template.jinja").symlink_to("chat_template.jinja")
    os.mkfifo(root / "a" / "tokenizer_config.json")
    (root / "a" / "tokenizer.json").mkdir()
    assert len(DirectorySource(str(root)).find("a").files) == 2


def test_a_snapshot_in_the_hub_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "models--x" / "snapshots" / "abc")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for file in list(adapter.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(Path("..") / ".." / "blobs" / file.name)
    assert len(DirectoryFolder(str(adapter)).list_files().files) == 2


def test_a_range_of_a_file_is_read(root: Path) -> None:
    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[1]
    content = (root / "a" / file.name).read_bytes()
    buffer = bytearray(100)
    folder.read(file, 50, memoryview(buffer), never)
    assert buffer == content[50:150]


def test_a_file_that_changed_since_it_was_listed_is_not_read(root: Path) -> None:
    """FR-22, FR-63: bytes of two versions are never mixed."""
    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[1]
    path = root / "a" / file.name
    content = path.read_bytes()
    for change in (
        lambda: os.utime(path, ns=(1, 1)),
        lambda: path.write_bytes(content[:-1]),
        path.unlink,
        lambda: os.mkfifo(path),
    ):
        change()
        with pytest.raises(SourceChanged):
            folder.read(file, 0, memoryview(bytearray(file.size)), never)


def test_a_file_that_is_written_while_it_is_read_is_not_used(root: Path) -> None:
    """FR-63."""
    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[1]

    def write() -> None:
        with (root / "a" / file.name).open("r+b") as other:
            other.write(b"\1")

    with pytest.raises(SourceChanged):
        folder.read(file, 0, memoryview(bytearray(file.size)), write)


def test_a_read_that_is_not_wanted_any_more_ends(root: Path) -> None:
    class Unwanted(Exception):
        pass

    def check() -> None:
        raise Unwanted

    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[0]
    with pytest.raises(Unwanted):
        folder.read(file, 0, memoryview(bytearray(10)), check)


def test_a_source_that_is_no_directory_is_a_400(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        DirectorySource(str(tmp_path / "absent"))


def refuse(error: type[OSError]) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise error(5, "at /secret/path")

    return call


@pytest.mark.parametrize("call", ["os.scandir", "os.stat"])
def test_a_directory_that_denies_access_says_so(
    call: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-64."""
    folder = DirectoryFolder(str(root / "a"))
    monkeypatch.setattr(call, refuse(PermissionError))
    with pytest.raises(AccessDenied) as caught:
        folder.list_files()
    assert caught.value.status == 502
    assert "/" not in caught.value.message


@pytest.mark.parametrize(
    ("call", "error", "status"),
    [("os.open", PermissionError, 502), ("os.preadv", OSError, 503)],
)
def test_a_file_that_cannot_be_read_is_an_error_of_its_source(
    call: str, error: type[OSError], status: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-64."""
    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[0]
    monkeypatch.setattr(call, refuse(error))
    with pytest.raises(LorafleetError) as caught:
        folder.read(file, 0, memoryview(bytearray(10)), never)
    assert caught.value.status == status
    assert "/" not in caught.value.message


def test_an_unreadable_adapter_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_stat = os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if f"{root}/a/" in str(path):
            raise PermissionError
        return real_stat(path, **kwargs)

    monkeypatch.setattr("os.stat", stat)
    assert [listing.name for listing in DirectorySource(str(root)).list_adapters()] == ["A.1", "b"]


def test_a_source_that_went_away_is_a_503(root: Path) -> None:
    """FR-64: it may come back."""
    source = DirectorySource(str(root))
    shutil.rmtree(root)
    with pytest.raises(Unavailable) as caught:
        source.list_adapters()
    assert caught.value.retry_after_s is not None


def test_a_file_that_is_cut_off_while_it_is_read_is_not_used(root: Path) -> None:
    """FR-63."""
    folder = DirectoryFolder(str(root / "a"))
    file = folder.list_files().files[1]
    with pytest.raises(SourceChanged):
        folder.read(
            file,
            0,
            memoryview(bytearray(file.size)),
            lambda: os.truncate(root / "a" / file.name, 0),
        )
