"""Two base models never share a digest, and reading it does not mean reading the weights."""

from __future__ import annotations

from pathlib import Path

from engine.model.digest import SAMPLE_BYTES, model_digest


def make(path: Path, config: bytes = b"{}", weights: bytes = b"w" * 10) -> str:
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / "model.safetensors").write_bytes(weights)
    return model_digest(path)


def test_equal_files_have_one_digest_and_different_ones_have_not(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    assert first == make(tmp_path / "b")
    others = [
        make(tmp_path / "c", config=b"{ }"),
        make(tmp_path / "d", weights=b"v" * 10),
        make(tmp_path / "e", weights=b"w" * 11),
        make(tmp_path / "f", weights=b"w" * (2 * SAMPLE_BYTES) + b"end"),
        make(tmp_path / "g", weights=b"w" * (2 * SAMPLE_BYTES) + b"END"),
    ]
    assert len({first, *others}) == 6
