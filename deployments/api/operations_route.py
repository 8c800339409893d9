"""GET /health and /metrics."""

from __future__ import annotations

import asyncio

from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from deployments.catalog_metrics import render
from deployments.service import AdapterCatalog, EngineService
from engine.errors import Unavailable

HEALTH_TIMEOUT_S = 5.0
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Operations:
    def __init__(self, service: EngineService, catalog: AdapterCatalog) -> None:
        self._service = service
        self._catalog = catalog

    async def health(self) -> Response:
        try:
            await asyncio.wait_for(self._service.check_health(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable("the health check timed out") from None
        return Response(status_code=200)

    async def metrics(self) -> Response:
        page = await self._service.metrics_text() + render(self._catalog.facts())
        return PlainTextResponse(page, media_type=METRICS_MEDIA_TYPE)
