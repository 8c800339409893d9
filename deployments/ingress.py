"""The HTTP application on Ray Serve: builds it over the engines' and the catalog's handles, and hosts it."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from deployments import tracing
from deployments.api.build import build_api
from deployments.api.settings import ApiSettings
from deployments.catalog_deployment import CatalogHandle
from deployments.catalog_view import CatalogView
from deployments.fleet_service import FleetService
from engine.heap import keep_what_is_there
from engine.tokenizer import Tokenizer
from router.residency_router import BASE_ID

LOOK_AGAIN_S = 0.5


@dataclass(frozen=True, slots=True)
class IngressSettings:
    model: str  # directory, hub id or s3://bucket/prefix, for the tokenizer
    model_names: tuple[str, ...]
    created: int  # epoch seconds
    load_timeout_s: float
    api_key_digests: tuple[str, ...]
    allow_runtime_loading: bool
    allowed_uri_prefixes: tuple[str, ...]


@serve.ingress()
class IngressDeployment:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: IngressSettings, engine: Any, catalog: Any
    ) -> None:
        """`engine`, `catalog`: deployment handles. Returns when an engine replica is ready."""
        self._settings = settings
        self._tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, settings.model)
        facts = await _facts(engine)
        self._service = FleetService(
            engine, settings.model_names[0], facts["max_model_len"], settings.load_timeout_s
        )
        self._catalog = CatalogView(CatalogHandle(catalog, settings.load_timeout_s))
        self._following = asyncio.create_task(self._catalog.run())
        keep_what_is_there()

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = ApiSettings(
            model_names=self._settings.model_names,
            max_model_len=self._service.max_model_len,
            created=self._settings.created,
            ingress_id=serve.get_replica_context().replica_id.unique_id,
            api_key_digests=self._settings.api_key_digests,
            allow_runtime_loading=self._settings.allow_runtime_loading,
            allowed_uri_prefixes=self._settings.allowed_uri_prefixes,
        )
        return build_api(self._service, self._catalog, self._tokenizer, settings, tracing.start(os.environ))


async def _facts(engine: Any) -> dict[str, Any]:
    """Waits for a replica for as long as it takes: weights may take minutes, a router waits for seconds.

    Serve gives up a whole application in which a constructor has failed three times.
    """
    while True:
        try:
            facts: dict[str, Any] = await engine.options(
                method_name="facts", multiplexed_model_id=BASE_ID
            ).remote()
        except (RayActorError, RayServeException):
            await asyncio.sleep(LOOK_AGAIN_S)
        else:
            return facts
