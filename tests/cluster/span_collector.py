"""A collector of spans over OTLP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ARRIVES_WITHIN_S = 15.0


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

    def wait_for(self, trace: str, count: int) -> dict[str, Span]:
        """The spans of that trace by name, as soon as there are so many."""
        deadline = time.monotonic() + ARRIVES_WITHIN_S
        while True:
            found = {span.name: span for span in self.spans if span.trace_id.hex() == trace}
            if len(found) >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.05)


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
