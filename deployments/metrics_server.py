"""A replica's own metrics page, on a port of its machine, where gateways and a PodMonitor read it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric

from deployments.metric_families import Stats
from deployments.metrics import families

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0


class MetricsServer:
    """Renders in a thread of its own; the event loop only fetches the statistics."""

    def __init__(self, port: int, stats: Callable[[], Awaitable[Stats]]) -> None:
        """To be made on the loop that `stats` runs on. Without a page if another replica has the port."""
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._stop: Callable[[], None] | None = None
        self.port: int | None = None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, thread = start_http_server(port, registry=registry)
        except OSError as error:
            logger.warning("no metrics page on port %d: %s", port, error.strerror)
            return

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self.port = server.server_port
        self._stop = stop

    def collect(self) -> Iterator[Metric]:
        """Called by a thread of the server, for each scrape."""
        stats = asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(STATS_TIMEOUT_S)
        return families([stats], time.time())

    async def _ask(self) -> Stats:
        return await self._stats()

    async def stop(self) -> None:
        if self._stop is not None:
            await asyncio.to_thread(self._stop)
