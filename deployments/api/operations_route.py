"""GET /health, /metrics and /metrics/ingress."""

from __future__ import annotations

import asyncio

from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from deployments.catalog_metrics import render
from deployments.exposition import text_of
from deployments.ingress_books import IngressBooks
from deployments.service import AdapterCatalog, EngineService
from engine.errors import Unavailable

HEALTH_TIMEOUT_S = 5.0
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Operations:
    def __init__(
        self, service: EngineService, catalog: AdapterCatalog, books: IngressBooks, ingress_id: str
    ) -> None:
        self._service = service
        self._catalog = catalog
        self._books = books
        self._ingress_id = ingress_id

    async def health(self) -> Response:
        try:
            await asyncio.wait_for(self._service.check_health(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable("the health check timed out") from None
        return Response(status_code=200)

    async def metrics(self) -> Response:
        return _page(await self._service.metrics_text() + self._of_ingress())

    async def ingress_metrics(self) -> Response:
        """Without the replicas' series: for who scrapes their own pages, too. Asks none of them."""
        return _page(self._of_ingress())

    def _of_ingress(self) -> str:
        return text_of(self._books.families(self._ingress_id)) + render(self._catalog.facts())


def _page(text: str) -> Response:
    return PlainTextResponse(text, media_type=METRICS_MEDIA_TYPE)
