"""Writes what was read into the disk cache, in a thread of its own: no request waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading

from engine.adapters.disk_cache import DiskCache
from engine.adapters.reader import FileReader

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 2.0


class DiskWriter:
    def __init__(self, cache: DiskCache, max_pending: int) -> None:
        """`max_pending`: adapters whose bytes are kept in memory until they are written."""
        self.cache = cache
        self._trouble: str | None = None  # that was told last
        self._pending: queue.Queue[FileReader | None] = queue.Queue(max_pending)
        self._thread = threading.Thread(target=self._run, name="adapter-disk", daemon=True)
        self._thread.start()

    def offer(self, reader: FileReader) -> None:
        """Keep what it read. Where loads outrun the disk, some are not kept: it is only a cache."""
        try:
            self._pending.put_nowait(reader)
        except queue.Full:
            logger.info("adapter %r is not kept on disk: the disk is busy", reader.listing.name)

    def close(self) -> None:
        """Write what is pending, if that does not take long."""
        try:
            self._pending.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while (reader := self._pending.get()) is not None:
            self._write(reader)
            del reader  # its bytes

    def _write(self, reader: FileReader) -> None:
        name = reader.listing.name
        trouble = None
        try:
            if not self.cache.write(reader.listing, reader.contents, reader.sha256):
                trouble = "no room in disk_cache_dir"
        except OSError as error:
            trouble = error.strerror
        except Exception:
            logger.exception("adapter %r is not kept on disk", name)
        # once, not with every load: a disk that is full stays so for hours
        if trouble and trouble != self._trouble:
            logger.error("adapter %r is not kept on disk: %s", name, trouble)
        self._trouble = trouble
