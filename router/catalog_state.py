"""What was loaded and removed at run time, in a file if there is one. Knows nothing of sources."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from engine.request import AdapterRef


class CatalogState:
    def __init__(self, path: Path | None) -> None:
        """None: kept in memory, gone with the catalog's process. Raises ValueError if it is not our file."""
        self._path = path
        self.loaded: dict[str, AdapterRef] = {}
        self.removed: set[str] = set()
        self._writing = asyncio.Lock()
        if path is not None and path.exists():
            self._read(path)

    async def add(self, ref: AdapterRef) -> None:
        self.removed.discard(ref.name)
        self.loaded[ref.name] = ref
        await self._write()

    async def remove(self, name: str, hide: bool) -> None:
        """`hide`: it is also in the source or in the configuration and would come back."""
        self.loaded.pop(name, None)
        if hide:
            self.removed.add(name)
        await self._write()

    def _read(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text())
            # the version may be another one by now: it is asked for again
            self.loaded = {name: AdapterRef(name, uri) for name, uri in data["loaded"].items()}
            self.removed = set(data["removed"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no catalog file") from error

    async def _write(self) -> None:
        if self._path is None:
            return
        async with self._writing:  # else an older state could be written last
            data = {
                "loaded": {name: ref.uri for name, ref in self.loaded.items()},
                "removed": sorted(self.removed),
            }
            await asyncio.to_thread(_replace_file, self._path, json.dumps(data, indent=1))


def _replace_file(path: Path, text: str) -> None:
    """All or nothing, also if the machine goes down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
