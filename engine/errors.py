"""Errors a caller can act on; each leaf is one cause with one HTTP status.

LorafleetError
├── InvalidRequest       400  a field of the request is wrong; `param` names it
│   ├── RequestTooLarge  400  it can never fit the page pool or the context window
│   └── AdapterRefused   400  an adapter's config field or tensor; `param` names it
├── ModelNotFound        404  no adapter or model of that name
├── Conflict             409  the adapter's name is taken
├── Overloaded           429  the queue is full; retry after `retry_after_s`
├── AccessDenied         502  the adapter source refused our credentials
└── Unavailable          503  retry after `retry_after_s`
    └── EngineDead       503  the engine process ended

Faults of ours are `assert`s and plain exceptions, never one of these.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LorafleetError(Exception):
    """Base of the tree. Crosses processes as `to_dict()` / `from_dict()`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def to_dict(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self.body(), "retry_after_s": self.retry_after_s}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> LorafleetError:
        cls = _CLASSES.get(data["class"], LorafleetError)
        return cls(
            data["message"], param=data["param"], code=data["code"], retry_after_s=data["retry_after_s"]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # the default one calls cls(*args), which loses the keyword-only fields
        return LorafleetError.from_dict, (self.to_dict(),)


class InvalidRequest(LorafleetError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_value"


class RequestTooLarge(InvalidRequest):
    default_code = "context_length_exceeded"


class AdapterRefused(InvalidRequest):
    default_code = "adapter_refused"


class ModelNotFound(LorafleetError):
    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class Conflict(LorafleetError):
    status = 409
    type = "invalid_request_error"
    default_code = "already_loaded"


class Overloaded(LorafleetError):
    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"


class AccessDenied(LorafleetError):
    status = 502
    default_code = "source_access_denied"


class Unavailable(LorafleetError):
    status = 503
    type = "service_unavailable_error"
    default_code = "unavailable"


class EngineDead(Unavailable):
    default_code = "engine_dead"


_CLASSES: dict[str, type[LorafleetError]] = {
    cls.__name__: cls
    for cls in (
        LorafleetError, InvalidRequest, RequestTooLarge, AdapterRefused, ModelNotFound,
        Conflict, Overloaded, AccessDenied, Unavailable, EngineDead,
    )
}  # fmt: skip
