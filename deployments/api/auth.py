"""API keys: who may call. Keeps digests only, so that no key can reach a log or an error."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api.http_errors import error_body

API_KEY_ENV = "LORAFLEET_API_KEY"  # one, or several with commas between
OPEN_PATHS = frozenset({"/health"})


def digest_key(key: str | bytes) -> str:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def load_api_keys(keys: Iterable[str], file: Path | None, env: Mapping[str, str]) -> tuple[str, ...]:
    """Digests of the keys of all three places. In the file: one a line, `#` starts a comment line.

    Raises ValueError if the file or the variable is there but holds no key: that would open the server.
    """
    found = [key.strip() for key in keys]
    if file is not None:
        lines = (line.strip() for line in file.read_text().splitlines())
        in_file = [line for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ValueError(f"{file} holds no API key")
        found += in_file
    if API_KEY_ENV in env:
        in_env = [key for key in map(str.strip, env[API_KEY_ENV].split(",")) if key]
        if not in_env:
            raise ValueError(f"{API_KEY_ENV} holds no API key")
        found += in_env
    if "" in found:
        raise ValueError("an API key must not be empty")
    return tuple(dict.fromkeys(digest_key(key) for key in found))


class ApiKeyMiddleware:
    """Lets a request pass that bears one of the keys, or that asks for an open path."""

    def __init__(
        self, app: ASGIApp, digests: tuple[str, ...], open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self.app = app
        self.digests = digests
        self.open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or scope["path"] in self.open_paths
            or self._allows(Headers(scope=scope))
        ):
            await self.app(scope, receive, send)
            return
        body = error_body("missing or incorrect API key", code="invalid_api_key")
        response = JSONResponse(body, 401, headers={"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # as it was sent: headers are read as Latin-1, which knows other blanks
        digest = digest_key(key.encode("latin-1").strip())
        # a list, so that the time does not tell which key matched
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return scheme.lower() == "bearer" and any(matches)
