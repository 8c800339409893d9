"""A process that uses a disk cache until it is killed: python -m ... ROOT CAPACITY SEED STEPS."""

from __future__ import annotations

import hashlib
import random
import sys

from engine.adapters.disk_cache import DiskCache
from engine.adapters.files import WEIGHTS_FILE, AdapterFile, AdapterListing, make_listing

SIZES = (1, 5000, 300_000, 900_000)
NUM_ADAPTERS = 12


def listing(number: int) -> AdapterListing:
    size = SIZES[number % len(SIZES)]
    return make_listing("a", f"s3://b/{number}", [AdapterFile(WEIGHTS_FILE, size, str(number))])


def content(number: int) -> bytes:
    return bytes([number]) * SIZES[number % len(SIZES)]


def write(cache: DiskCache, number: int) -> bool:
    sha256 = hashlib.sha256(content(number)).hexdigest()
    return cache.write(listing(number), {WEIGHTS_FILE: content(number)}, {WEIGHTS_FILE: sha256})


def read(cache: DiskCache, number: int) -> bool:
    """Is it there? Raises AssertionError if it is not whole."""
    folder = cache.open(listing(number).uri, listing(number).version)
    if folder is None:
        return False
    with folder:
        assert folder.list_files() == listing(number)
        buffer = bytearray(len(content(number)))
        folder.read(folder.listing.files[0], 0, memoryview(buffer), lambda: None)
        assert buffer == content(number)
        assert folder.digests == {WEIGHTS_FILE: hashlib.sha256(buffer).hexdigest()}
    return True


def tell(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    root, capacity, seed, steps = sys.argv[1], *map(int, sys.argv[2:])
    cache = DiskCache(root, capacity)
    rng = random.Random(seed)
    tell("ready")
    for _ in range(steps):
        number = rng.randrange(NUM_ADAPTERS)
        if not read(cache, number):
            write(cache, number)
    tell("done")


if __name__ == "__main__":
    main()
