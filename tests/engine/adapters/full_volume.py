"""A disk cache on a real volume that others fill: python -m ... MOUNTED_DIR URI, an adapter's in S3.

The end is told by the exit status.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.adapters.disk_cache import DiskCache
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.image import AdapterImage
from engine.adapters.loading import load_image
from engine.adapters.source import describe
from tests.engine.adapters.adapter_dirs import FORMAT
from tests.engine.adapters.disk_process import listing, read, write


def fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:  # no space left
                continue


def main(root: Path, uri: str) -> None:
    cache = DiskCache(str(root / "cache"), 1 << 30)
    for number in (2, 6):
        assert write(cache, number)
    version = describe(uri).version

    def load() -> AdapterImage:
        writer = DiskWriter(cache, max_pending=4)
        try:
            return load_image(uri, FORMAT, version=version, disk=writer)
        finally:
            writer.close()

    held = cache.open("s3://b/2", listing(2).version)
    assert held is not None
    with held:
        fill(root / "others")
        assert read(cache, 2)
        assert read(cache, 6), "what is here goes on being served"
        # the entries are of a size to make room for this one: it takes that of 6, for 2 is being read
        assert not load().is_from_disk
        assert load().is_from_disk
        assert read(cache, 2)
        assert not read(cache, 6)
    fill(root / "others-again")
    cache.discard("s3://b/2", listing(2).version)
    cache.discard(uri, version)
    fill(root / "others-at-last")
    image = load()
    assert not image.is_from_disk
    assert not load().is_from_disk, "nothing was kept, and nothing failed"
    assert os.listdir(root / "cache" / "tmp") == []
    (root / "others").unlink()
    assert load().digest == image.digest
    assert load().is_from_disk


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
