"""HTTP answers that go wrong on demand: refused, late, cut, reset, stalled, slow, wrong."""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

FaultKind = Literal["status", "late", "cut", "reset", "stall", "slow", "flip", "change", "whole", "start"]
"""change: another content is put there before the answer; whole: the range that was asked for is ignored;
start: as many bytes as were asked for, but the first ones."""


@dataclass
class Fault:
    """What happens to the next `times` requests whose key contains `match`."""

    kind: FaultKind
    match: str = ""
    times: int = 1 << 30
    status: int = 503
    code: str = "SlowDown"
    keep: int = 0  # bytes of the body before it goes wrong
    seconds: float = 0.0  # of a late answer, of a stall, of a whole slow body
    content: bytes = b""  # of a change


@dataclass
class Faults:
    planned: list[Fault] = field(default_factory=list)
    num_met: int = 0  # requests that a fault happened to
    num_connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def fail(self, kind: FaultKind, match: str = "", **fields: Any) -> None:
        self.planned.append(Fault(kind, match, **fields))

    def take(self, key: str) -> Fault | None:
        with self.lock:
            for fault in self.planned:
                if fault.match in key and fault.times > 0:
                    fault.times -= 1
                    self.num_met += 1
                    return fault
        return None

    def reset(self) -> None:
        self.planned.clear()
        self.num_met = 0


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults

    def setup(self) -> None:
        super().setup()
        with self.faults.lock:
            self.faults.num_connections += 1

    def do_GET(self) -> None:
        self.get()

    def get(self) -> None:
        raise NotImplementedError

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def error(self, status: int, code: str) -> None:
        """As S3 words it."""
        self.answer(status, f"<Error><Code>{code}</Code><Message>secret detail</Message></Error>".encode())

    def answer(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        kind = fault.kind if fault else None
        if fault and kind == "late":
            self.faults.stopped.wait(fault.seconds)
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault is None or kind in ("late", "change", "whole", "start"):
            self.wfile.write(body)
        elif kind == "flip":
            position = min(fault.keep, len(body) - 1)
            self.wfile.write(body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :])
        elif kind == "slow":
            for part in range(10):
                self.wfile.write(body[len(body) * part // 10 : len(body) * (part + 1) // 10])
                self.faults.stopped.wait(fault.seconds / 10)
        else:
            self._break_off(body[: fault.keep], fault)

    def _break_off(self, body: bytes, fault: Fault) -> None:
        self.wfile.write(body)
        self.wfile.flush()
        if fault.kind == "stall":
            self.faults.stopped.wait(fault.seconds)
        if fault.kind == "reset":  # not even the connection ends well
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True


@contextmanager
def serve(handler: type[FaultyHandler]) -> Iterator[str]:
    """Yields the endpoint URL."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        handler.faults.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are expected here, and connections that we reset."""
        if not isinstance(sys.exception(), (ConnectionError, ValueError, OSError)):
            super().handle_error(request, client_address)
