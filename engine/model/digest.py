"""Tells base models apart: two replicas with one digest serve the same weights."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

SAMPLE_BYTES = 1 << 16


def model_digest(path: Path) -> str:
    """16 hexadecimal digits, of the configuration and of each weight file's name, size, first and last bytes.

    Gigabytes are not read.
    """
    digest = blake2b((path / "config.json").read_bytes(), digest_size=8)
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()
