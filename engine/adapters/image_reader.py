"""What reads images for a loader: threads of this process, or a process of its own (`remote_reader`)."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Protocol

from engine.adapters.disk_cache import DiskCache
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.errors import InvalidRequest

logger = logging.getLogger(__name__)


class ImageReader(Protocol):
    """May be used by several threads, each of which waits for its image."""

    def read(
        self,
        uri: str,
        form: ImageFormat,
        check: Callable[[], None],
        is_over: Callable[[], bool],
        version: str | None,
    ) -> AdapterImage:
        """As `load_image`: `check` is called when bytes have moved. `is_over`: nobody wants it any more."""

    def close(self) -> None: ...


class LocalReader:
    def __init__(self, config: EngineConfig) -> None:
        """Raises InvalidRequest if disk_cache_dir cannot be used."""
        cache = open_disk_cache(config)
        self._disk = DiskWriter(cache, config.max_parallel_loads) if cache else None

    def read(
        self,
        uri: str,
        form: ImageFormat,
        check: Callable[[], None],
        is_over: Callable[[], bool],  # `check` says it early enough
        version: str | None,
    ) -> AdapterImage:
        return load_image(uri, form, check, version, self._disk)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()


def open_disk_cache(config: EngineConfig) -> DiskCache | None:
    """None: without one. Raises InvalidRequest if disk_cache_dir cannot be used."""
    if config.disk_cache_dir is None:
        return None
    try:
        return DiskCache(config.disk_cache_dir, config.disk_cache_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # whoever fills the volume must not keep replicas from starting
            logger.error("nothing is kept in disk_cache_dir: %s", error.strerror)
            return None
        raise InvalidRequest(
            f"disk_cache_dir cannot be used: {error.strerror}", param="disk_cache_dir"
        ) from error
