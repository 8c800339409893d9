"""What reads images for a loader: threads of this process, or a process of its own (`remote_reader`)."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.adapters.disk_cache import DiskCache
from engine.adapters.disk_writer import DiskWriter
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.errors import InvalidRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedImage:
    uri: str
    version: str | None  # None: whatever is there
    form: ImageFormat
    check: Callable[[], None] = lambda: None  # called when bytes have moved; what it raises ends the load
    is_over: Callable[[], bool] = lambda: False  # nobody wants it any more


class ImageReader(Protocol):
    """May be used by several threads, each of which waits for its image."""

    def read(self, wanted: WantedImage) -> AdapterImage:
        """Raises as `load_image`."""

    def close(self) -> None: ...


class LocalReader:
    def __init__(self, config: EngineConfig) -> None:
        """Raises InvalidRequest if disk_cache_dir cannot be used."""
        cache = open_disk_cache(config)
        self._disk = DiskWriter(cache, config.max_parallel_loads) if cache else None

    def read(self, wanted: WantedImage) -> AdapterImage:
        # `check` says early enough that it is over
        return load_image(wanted.uri, wanted.form, wanted.check, wanted.version, self._disk)

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
