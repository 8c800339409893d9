"""Reads an adapter through a process of its own, prints that process's id, and waits for ever."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from engine.adapters.host_memory import HostArena
from engine.adapters.image_reader import WantedImage
from engine.adapters.remote_reader import RemoteReader
from engine.config import EngineConfig
from tests.engine.adapters.adapter_dirs import FORMAT


def main(uri: str) -> None:
    form = replace(FORMAT, arena=HostArena(FORMAT.page_elems, FORMAT.dtype))
    reader = RemoteReader(EngineConfig(model="unused"))
    reader.read(WantedImage(uri, None, form))
    sys.stdout.write(f"{reader.pid}\n")
    sys.stdout.flush()
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
