"""A served request's spans arrive at a collector over OTLP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.cluster.serve_process import serving
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.cluster

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ARRIVES_WITHIN_S = 15.0
STAGES = ["route", "load adapter", "queue", "prefill", "decode"]


class Collector:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(names["service.name"])
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def wait_for(self, count: int) -> dict[str, Span]:
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while len(self.spans) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        return {span.name: span for span in self.spans}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Yields its address."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", collector
        server.shutdown()


def test_the_stages_of_a_cold_request_arrive_in_order(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    (tmp_path / "source").mkdir()
    make_adapter(base, tmp_path / "source" / "sql", rank=4, targets=ALL_LINEAR, seed=0)
    flags = ["--model", str(base), "--adapter-source", str(tmp_path / "source"), "--proxy", "python",
             "--pool-bytes", "4000000"]  # fmt: skip
    with collecting() as (address, collector):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with serving(flags, environment) as server:
            body = b'{"model": "sql", "prompt": "abc", "max_tokens": 8}'
            headers = {"content-type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}
            began = time.time_ns()
            with urlopen(Request(f"{server.url}/v1/completions", body, headers), timeout=60) as answer:
                assert answer.status == 200
            ended = time.time_ns()
            spans = collector.wait_for(2 + len(STAGES))
    assert set(spans) == {"POST /v1/completions", "generate", *STAGES}
    assert collector.services == {"lorafleet"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["POST /v1/completions"].parent_span_id.hex() == PARENT
    assert {spans[name].parent_span_id for name in STAGES} == {spans["generate"].span_id}
    borders = [began]
    for name in STAGES:
        borders += [spans[name].start_time_unix_nano, spans[name].end_time_unix_nano]
    borders.append(ended)
    assert borders == sorted(borders)
    tier = {a.key: a.value.string_value for a in spans["load adapter"].attributes}
    assert tier == {"lorafleet.adapter.tier": "source"}
