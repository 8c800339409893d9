"""Every failed request as an OpenAI error object. Knows the error tree and FastAPI's own errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from engine.errors import InvalidRequest, LorafleetError

log = logging.getLogger(__name__)

DEFAULT_RETRY_AFTER_S = 1
CODES = {403: "disabled", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
MAX_SHOWN = 64  # characters of a client's text in a message
MAX_MESSAGE = 512  # characters


def shown(text: str) -> str:
    """Client text for an error message: quoted, escaped and cut."""
    return ascii(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...")


def error_body(
    message: str, kind: str = "invalid_request_error", *, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def internal_error_body() -> dict[str, Any]:
    return error_body("internal error", "server_error", code="internal_error")


def error_response(error: LorafleetError) -> JSONResponse:
    return JSONResponse({"error": error.body()}, error.status, headers=_retry_after(error))


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(LorafleetError, _on_lorafleet_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_exception)


def _retry_after(error: LorafleetError) -> Mapping[str, str]:
    if error.status not in (429, 503):
        return {}
    return {"retry-after": str(max(math.ceil(error.retry_after_s or 0), DEFAULT_RETRY_AFTER_S))}


async def _on_lorafleet_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LorafleetError)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_invalid_request(error.errors()))


def _invalid_request(errors: Sequence[Any]) -> InvalidRequest:
    """The first field that is wrong. Never repeats what the client sent."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON")
    field = first["loc"][1] if len(first["loc"]) > 1 else None
    if field is None:
        return InvalidRequest("the body must be a JSON object, with Content-Type: application/json")
    # a union reports one error per alternative, and none of them alone is the truth
    messages = dict.fromkeys(e["msg"] for e in errors if e["loc"][1] == field)
    return InvalidRequest(f"{field}: {' or: '.join(messages)}", param=field)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_body(error.detail, code=CODES.get(error.status_code))
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the access log: nobody reads it


async def _on_exception(request: Request, error: Exception) -> Response:
    # the server above re-raises and logs it
    return JSONResponse(internal_error_body(), 500)
