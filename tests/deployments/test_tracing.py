"""When requests are traced, and the spans that one leaves."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import StatusCode

from deployments import tracing
from deployments.spans import Tracing
from engine.errors import AdapterRefused
from engine.request import GenerateRequest, Milestones
from tests.deployments.api.fake_fleet import BASE, FakeFleet, Step, delta, steps

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
COLD = Milestones(1000.0, 1002.0, 1003.0, 1004.0, "source", "r1", "home")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def told(milestones: Milestones) -> Any:
    def script(request: GenerateRequest) -> Iterator[Step]:
        assert request.is_traced
        yield [replace(delta(request, "a"), milestones=milestones)]
        yield [delta(request, "b", finish="stop", num_output_tokens=2)]

    return script


class Traced:
    """A fleet whose spans stay here."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.fleet = FakeFleet(tracing=Tracing(provider))
        self.fleet.catalog.add("sql")

    @asynccontextmanager
    async def client(self, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
        async with self.fleet.client(**settings) as client:
            yield client

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        finished = self._exporter.get_finished_spans()
        assert len({span.name for span in finished}) == len(finished)
        return {span.name: span for span in finished}


async def ask(client: httpx2.AsyncClient, model: str = "sql", **body: Any) -> httpx2.Response:
    return await client.post(
        "/v1/completions", json={"model": model, "prompt": "hi", **body}, headers=TRACEPARENT
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_its_stages_below_the_clients_span(stream: bool) -> None:
    traced = Traced()
    traced.fleet.service.script = told(COLD)
    async with traced.client() as client:
        assert (await ask(client, stream=stream)).status_code == 200
    spans = traced.spans
    assert list(spans) == [
        "route",
        "load adapter",
        "queue",
        "prefill",
        "decode",
        "generate",
        "POST /v1/completions",
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    parents = {name: span.parent and f"{span.parent.span_id:016x}" for name, span in spans.items()}
    ids = {name: f"{span.context.span_id:016x}" for name, span in spans.items()}
    assert parents.pop("POST /v1/completions") == PARENT
    assert parents.pop("generate") == ids["POST /v1/completions"]
    assert set(parents.values()) == {ids["generate"]}
    times = {name: (span.start_time, span.end_time) for name, span in spans.items()}
    for name, start, end in ("load adapter", 1000, 1002), ("queue", 1002, 1003), ("prefill", 1003, 1004):
        assert times[name] == (start * 10**9, end * 10**9)


async def test_spans_say_what_was_asked_and_where_it_went() -> None:
    traced = Traced()
    traced.fleet.service.script = told(COLD)
    async with traced.client() as client:
        await ask(client)
    spans = traced.spans
    assert dict(spans["route"].attributes or {}) == {"lorafleet.route": "home", "lorafleet.replica": "r1"}
    assert dict(spans["load adapter"].attributes or {}) == {"lorafleet.adapter.tier": "source"}
    generate = dict(spans["generate"].attributes or {})
    assert generate["lorafleet.adapter"] == "sql"
    assert generate["gen_ai.usage.input_tokens"] == generate["gen_ai.usage.output_tokens"] == 2
    assert generate["gen_ai.response.finish_reasons"] == ("stop",)
    server = dict(spans["POST /v1/completions"].attributes or {})
    assert server["http.response.status_code"] == 200


async def test_what_is_in_memory_has_no_load() -> None:
    traced = Traced()
    traced.fleet.service.script = told(replace(COLD, loaded=1000.0, tier="hbm"))
    async with traced.client() as client:
        await ask(client)
    assert "load adapter" not in traced.spans
    assert dict(traced.spans["generate"].attributes or {})["lorafleet.adapter.tier"] == "hbm"


async def test_an_error_marks_its_span() -> None:
    traced = Traced()
    traced.fleet.service.script = steps(AdapterRefused("no", param="use_dora"))
    async with traced.client() as client:
        status = (await ask(client)).status_code
    spans = traced.spans
    assert spans["generate"].status.status_code is StatusCode.ERROR
    assert dict(spans["generate"].attributes or {})["error.type"] == "adapter_refused"
    assert dict(spans["POST /v1/completions"].attributes or {})["http.response.status_code"] == status
    assert set(spans) == {"generate", "POST /v1/completions"}


async def test_other_pages_and_strangers_leave_no_trace() -> None:
    traced = Traced()
    async with traced.client(api_key_digests=("0" * 64,)) as client:
        assert (await ask(client)).status_code == 401
        await client.get("/health")
    assert traced.spans == {}


@pytest.mark.parametrize("is_on", [True, False])
async def test_engines_are_asked_for_nothing_where_nobody_looks(is_on: bool) -> None:
    """Tracing is off, or this request is not sampled."""
    traced = Traced(ALWAYS_OFF)
    if not is_on:
        traced.fleet.tracing = None
    async with traced.client() as client:
        assert (await ask(client, BASE)).status_code == 200
    assert [request.is_traced for request in traced.fleet.service.requests] == [False]
    assert traced.spans == {}


@pytest.mark.parametrize(
    ("environ", "is_on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "fleet"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_open_telemetrys_own_variables_decide(environ: dict[str, str], is_on: bool) -> None:
    assert tracing.is_configured(environ) == is_on


def test_a_fleet_without_the_packages_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "deployments.spans", None)
    assert tracing.start({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "lorafleet[otel]" in caplog.text
