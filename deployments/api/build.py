"""The OpenAI-compatible HTTP application. It knows the fleet through two protocols only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from deployments.api.adapters_route import Pinning, RuntimeLoading, loading_is_off
from deployments.api.auth import OPEN_PATHS, ApiKeyMiddleware
from deployments.api.body_limit import BodyLimitMiddleware
from deployments.api.chat import ChatCompletions
from deployments.api.completions import Completions
from deployments.api.http_errors import install_error_handlers
from deployments.api.model_resolver import ModelResolver
from deployments.api.models_route import Models
from deployments.api.operations_route import Operations
from deployments.api.prompts import PromptEncoder, PromptTokenizer
from deployments.api.request_id import RequestIdMiddleware
from deployments.api.settings import ApiSettings
from deployments.api.tokenize_route import Tokenization
from deployments.dashboard.route import OPEN_PATHS as DASHBOARD_PATHS
from deployments.dashboard.route import Dashboard
from deployments.ingress_books import IngressBooks
from deployments.service import AdapterCatalog, EngineService, TokenSource, TokenSources

if TYPE_CHECKING:
    from deployments.spans import Tracing


def build_api(
    service: EngineService,
    catalog: AdapterCatalog,
    tokenizer: PromptTokenizer,
    settings: ApiSettings,
    tracing: Tracing | None = None,
) -> FastAPI:
    prompts = PromptEncoder(tokenizer, settings.max_model_len)
    resolver = ModelResolver(settings.model_names, catalog)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        prompts.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(title="lorafleet", lifespan=lifespan)
    models = Models(catalog, resolver, settings)
    tokenization = Tokenization(resolver, prompts, settings)
    books = IngressBooks()
    operations = Operations(service, catalog, books, settings.ingress_id)
    sources = TokenSources(
        streamed=_observed(service, books, tracing), whole=_observed(service.whole, books, tracing)
    )
    app.post("/v1/chat/completions")(ChatCompletions(sources, resolver, prompts).create)
    app.post("/v1/completions")(Completions(sources, resolver, prompts).create)
    app.get("/v1/models")(models.list)
    app.get("/v1/models/{model:path}")(models.get)
    app.post("/tokenize")(tokenization.tokenize)
    app.post("/detokenize")(tokenization.detokenize)
    app.get("/health")(operations.health)
    app.get("/metrics")(operations.metrics)
    app.get("/metrics/ingress")(operations.ingress_metrics)
    Dashboard(service).add_to(app)
    loading = RuntimeLoading(catalog, settings)
    enabled = settings.allow_runtime_loading
    app.post("/v1/load_lora_adapter")(loading.load if enabled else loading_is_off)
    app.post("/v1/unload_lora_adapter")(loading.unload if enabled else loading_is_off)
    pinning = Pinning(service)
    app.post("/v1/pin_lora_adapter")(pinning.pin if enabled else loading_is_off)
    app.post("/v1/unpin_lora_adapter")(pinning.unpin if enabled else loading_is_off)
    install_error_handlers(app)
    # the last one added sees a request first; who has no key leaves no trace
    if tracing is not None:
        tracing.add_to(app)
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=settings.max_body_bytes)
    if settings.api_key_digests:
        open_paths = OPEN_PATHS | DASHBOARD_PATHS
        app.add_middleware(ApiKeyMiddleware, digests=settings.api_key_digests, open_paths=open_paths)
    app.add_middleware(RequestIdMiddleware)
    return app


def _observed(source: TokenSource, books: IngressBooks, tracing: Tracing | None) -> TokenSource:
    counted = books.counted(source)
    return counted if tracing is None else tracing.traced(counted)
