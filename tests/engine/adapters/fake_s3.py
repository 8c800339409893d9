"""As much of S3 as the reader uses, over HTTP, with faults on demand: what a cut body or a 503 looks like."""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

FaultKind = Literal["status", "cut", "stall", "slow", "change", "whole"]


@dataclass
class Fault:
    """What happens to the next `times` requests whose key contains `match`."""

    kind: FaultKind
    match: str = ""
    times: int = 1 << 30
    status: int = 503
    code: str = "SlowDown"
    keep: int = 0  # bytes of the body sent before it is cut
    seconds: float = 0.0
    content: bytes = b""  # of a change


@dataclass
class FakeS3:
    bucket: str = "models"
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # keys got, and prefixes listed
    page_size: int = 1000
    num_connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def etag(self, key: str) -> str:
        return f'"{zlib.crc32(self.objects[key]):08x}"'

    def reset(self) -> None:
        for state in (self.objects, self.faults, self.requests):
            state.clear()
        self.page_size = 1000

    def fail(self, kind: FaultKind, match: str = "", **fields: object) -> None:
        self.faults.append(Fault(kind, match, **fields))  # type: ignore[arg-type]

    def take_fault(self, key: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.match in key and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    @property
    def keys_got(self) -> list[str]:
        return [request for request in self.requests if not request.startswith("list ")]


@contextmanager
def serve(fake: FakeS3) -> Iterator[str]:
    """Yields the endpoint URL."""

    class Handler(_Handler):
        s3 = fake

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        fake.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are expected here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: FakeS3

    def setup(self) -> None:
        super().setup()
        with self.s3.lock:
            self.s3.num_connections += 1

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = parse_qs(url.query)
        fault = self.s3.take_fault(key or "list")
        if fault and fault.kind == "status":
            self._error(fault.status, fault.code)
        elif bucket != self.s3.bucket:
            self._error(404, "NoSuchBucket")
        elif key:
            self._get_object(key, fault)
        else:
            self._list(query)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        start = int(query.get("continuation-token", ["0"])[0])
        self.s3.requests.append(f"list {prefix}")
        keys = [
            key
            for key in sorted(self.s3.objects)
            if key.startswith(prefix) and not (delimiter and delimiter in key[len(prefix) :])
        ]
        page = keys[start : start + self.s3.page_size]
        more = start + self.s3.page_size < len(keys)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.s3.objects[key])}</Size>"
            f"<ETag>{escape(self.s3.etag(key))}</ETag></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{start + self.s3.page_size}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{truncated}{token}{contents}</ListBucketResult>".encode())

    def _get_object(self, key: str, fault: Fault | None) -> None:
        self.s3.requests.append(key)
        if fault and fault.kind == "change":
            self.s3.objects[key] = fault.content
        if key not in self.s3.objects:
            return self._error(404, "NoSuchKey")
        if self.headers.get("If-Match", self.s3.etag(key)) != self.s3.etag(key):
            return self._error(412, "PreconditionFailed")
        content = self.s3.objects[key]
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        body = content if fault and fault.kind == "whole" else content[int(first) : int(last) + 1]
        headers = {
            "ETag": self.s3.etag(key),
            "Content-Range": f"bytes {first}-{int(first) + len(body) - 1}/{len(content)}",
        }
        return self._answer(206, body, headers, fault)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>secret detail</Message></Error>".encode())

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        if fault and fault.kind == "slow":
            self.s3.stopped.wait(fault.seconds)
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault and fault.kind in ("cut", "stall"):
            self.wfile.write(body[: fault.keep])
            self.wfile.flush()
            if fault.kind == "stall":
                self.s3.stopped.wait(fault.seconds)
            self.close_connection = True
        else:
            self.wfile.write(body)
