"""Spans of a request, by OpenTelemetry; all are made at the ingress, the engine only tells its milestones.

POST /v1/completions        the client's traceparent is its parent
  generate                  one a prompt
    route                   from the ingress into an engine
    load adapter            only if it was on disk or at its source
    queue                   until its first tokens are scheduled
    prefill                 until its first token
    decode                  until its last one
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from typing import Self

from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.service import TokenSource, close
from engine.errors import LorafleetError
from engine.request import GenerateRequest, Milestones, OutputDelta

TRACED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
READ_TIERS = ("disk", "source")

Stage = tuple[str, float, float, dict[str, AttributeValue]]  # name, from, to, attributes


class Tracing:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("lorafleet")

    @classmethod
    def over_otlp(cls) -> Self:
        """As OpenTelemetry's variables say; the protocol is http/protobuf."""
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "lorafleet"}))
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def add_to(self, app: FastAPI) -> None:
        app.add_middleware(TracingMiddleware, tracer=self._tracer)

    def traced(self, source: TokenSource) -> TracedSource:
        return TracedSource(source, self._tracer)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class TracingMiddleware:
    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self.app = app
        self._tracer = tracer
        self._w3c = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in TRACED_PATHS:
            await self.app(scope, receive, send)
            return
        attributes = {
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "lorafleet.request_id": scope["state"]["request_id"],
        }
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=self._w3c.extract(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes=attributes,
        ) as span:

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self.app(scope, receive, send_noting_status)


@dataclass(slots=True)
class _Seen:
    """Of a request's answer."""

    milestones: Milestones | None = None
    last: OutputDelta | None = None
    num_output_tokens: int = 0

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            self.milestones = self.milestones or delta.milestones
            self.last = delta
            self.num_output_tokens += len(delta.token_ids)


class TracedSource:
    """A TokenSource whose requests leave spans."""

    def __init__(self, source: TokenSource, tracer: Tracer) -> None:
        self._source = source
        self._tracer = tracer

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[OutputDelta]]:
        # not "current" while it lasts: a generator's steps may run in different contexts
        span = self._tracer.start_span("generate")
        seen, sent = _Seen(), time.time()
        try:
            stream = self._source.generate(replace(request, is_traced=span.is_recording()))
            try:
                async for deltas in stream:
                    seen.take(deltas)
                    yield deltas
            finally:
                await close(stream)
        except LorafleetError as error:
            span.set_status(StatusCode.ERROR, error.message)
            span.set_attribute("error.type", error.code or type(error).__name__)
            raise
        finally:
            if span.is_recording():
                span.set_attributes(dict(_attributes(request, seen)))
                self._add_stages(span, sent, seen.milestones)
            span.end()

    def _add_stages(self, parent: Span, sent: float, milestones: Milestones | None) -> None:
        if milestones is None:
            return
        context = set_span_in_context(parent)
        for name, start, end, attributes in _stages(sent, milestones, time.time()):
            span = self._tracer.start_span(name, context, attributes=attributes, start_time=int(1e9 * start))
            # machines' clocks differ a little
            span.end(int(1e9 * max(start, end)))


def _stages(sent: float, at: Milestones, ended: float) -> Iterator[Stage]:
    yield "route", sent, at.arrived, {"lorafleet.route": at.route, "lorafleet.replica": at.replica}
    if at.tier in READ_TIERS:
        yield "load adapter", at.arrived, at.loaded, {"lorafleet.adapter.tier": at.tier}
    yield "queue", at.loaded, at.started, {}
    yield "prefill", at.started, at.first_token, {}
    yield "decode", at.first_token, ended, {}


def _attributes(request: GenerateRequest, seen: _Seen) -> Iterator[tuple[str, AttributeValue]]:
    yield "lorafleet.engine_request_id", request.request_id
    yield "gen_ai.usage.input_tokens", len(request.prompt_token_ids)
    yield "gen_ai.usage.output_tokens", seen.num_output_tokens
    if request.adapter is not None:
        yield "lorafleet.adapter", request.adapter.name
    if seen.milestones is not None and seen.milestones.tier is not None:
        yield "lorafleet.adapter.tier", seen.milestones.tier
    if seen.last is not None:
        yield "lorafleet.cached_tokens", seen.last.num_cached_tokens
        if seen.last.finish_reason is not None:
            yield "gen_ai.response.finish_reasons", (seen.last.finish_reason,)
