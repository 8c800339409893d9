"""Tells base models apart: two replicas with one digest serve the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from engine.model.remote import RemoteFile

SAMPLE_BYTES = 1 << 16


class _LocalFile:
    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.size = path.stat().st_size
        self._path = path

    def read(self, start: int, stop: int) -> bytes:
        with self._path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)


def model_digest(path: Path, remote: Sequence[RemoteFile] | None = None) -> str:
    """16 hexadecimal digits, of the configuration and of each weight file's name, size, first and last bytes.

    Gigabytes are not read. `remote`: the weight files, if they do not lie in `path`.
    """
    digest = blake2b((path / "config.json").read_bytes(), digest_size=8)
    local = [_LocalFile(file) for file in sorted(path.glob("*.safetensors"))]
    for file in local if remote is None else remote:
        digest.update(f"\0{file.name}\0{file.size}\0".encode())
        digest.update(file.read(0, min(SAMPLE_BYTES, file.size)))
        digest.update(file.read(max(0, file.size - SAMPLE_BYTES), file.size))
    return digest.hexdigest()
