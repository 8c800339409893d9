"""GET /dashboard: the page and its files, which hold no data, and /dashboard/data, which does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi import Query as Param
from starlette.responses import FileResponse, Response

from deployments.dashboard.overview import Query, overview
from deployments.service import EngineService

STATIC = Path(__file__).with_name("static")
PAGE = "index.html"
FILES = ("dashboard.js", "charts.js", "dashboard.css", "uPlot.iife.min.js", "uPlot.min.css")
OPEN_PATHS = frozenset({"/dashboard", *(f"/dashboard/{name}" for name in FILES)})
FRESH_S = 1.0  # statistics are asked for no more often, however many pages are open
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}

Sort = Literal["hot", "misses", "hit_ratio", "blocked", "evictions", "name"]


class Dashboard:
    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._replicas: list[dict[str, Any]] = []
        self._asked = float("-inf")
        self._at_s = 0.0  # when that was, on a clock that several ingress replicas share

    def add_to(self, app: FastAPI) -> None:
        app.get("/dashboard", include_in_schema=False)(self.page)
        app.get("/dashboard/data", include_in_schema=False)(self.data)
        for name in FILES:
            app.get(f"/dashboard/{name}", include_in_schema=False)(_sends(name))

    async def page(self) -> Response:
        return FileResponse(STATIC / PAGE, headers=HEADERS)

    async def data(
        self,
        search: Annotated[str, Param(max_length=128)] = "",
        sort: Sort = "hot",
        page: Annotated[int, Param(ge=0, le=1_000_000)] = 0,
    ) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._asked > FRESH_S:
                self._replicas = (await self._service.stats())["replicas"]
                self._asked, self._at_s = time.monotonic(), time.time()
            replicas, at_s = self._replicas, self._at_s
        # thousands of adapters take milliseconds, in which no stream of this process would move
        found = await asyncio.to_thread(overview, replicas, Query(search, sort, page))
        return {"model": self._service.model_name, "at_s": at_s, **found}


def _sends(name: str) -> Any:
    async def send() -> Response:
        return FileResponse(STATIC / name, headers=HEADERS)

    return send
