"""A proxy between an S3 client and a real S3 server, which lets answers go wrong on demand."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.engine.adapters import faults
from tests.engine.adapters.faults import Faults, FaultyHandler


@contextmanager
def serve(proxy: Faults, backend: str) -> Iterator[str]:
    """Yields the endpoint URL. `backend`: the server's. Faults match path, a space, and the Range header."""

    class Handler(_Handler):
        faults = proxy
        address = urlsplit(backend).netloc

    with faults.serve(Handler) as endpoint:
        yield endpoint


class _Handler(FaultyHandler):
    address: str

    def get(self) -> None:
        fault = self.faults.take(f"{self.path} {self.headers.get('Range', '')}")
        if fault and fault.kind == "status":
            self.error(fault.status, fault.code)
            return
        connection = http.client.HTTPConnection(self.address)
        try:
            connection.request("GET", self.path, headers=dict(self.headers.items()))
            response = connection.getresponse()
            body = response.read()
            ours = ("content-length", "transfer-encoding", "connection", "date", "server")
            headers = {name: value for name, value in response.getheaders() if name.lower() not in ours}
            self.answer(response.status, body, headers, fault)
        finally:
            connection.close()
