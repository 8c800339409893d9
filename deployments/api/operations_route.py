"""GET /health and /metrics."""

from __future__ import annotations

import asyncio

from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from deployments.service import EngineService
from engine.errors import Unavailable

HEALTH_TIMEOUT_S = 5.0
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Operations:
    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def health(self) -> Response:
        try:
            await asyncio.wait_for(self._service.check_health(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable("the health check timed out") from None
        return Response(status_code=200)

    async def metrics(self) -> Response:
        return PlainTextResponse(await self._service.metrics_text(), media_type=METRICS_MEDIA_TYPE)
