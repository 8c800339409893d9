"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's JSON and answers.

Owns where an adapter may be loaded from. No answer shows a path of the server.
"""

from __future__ import annotations

import os.path
from pathlib import Path

from fastapi import Request
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from deployments.api.http_errors import shown
from deployments.api.protocol import LoadAdapterRequest, PinAdapterRequest, UnloadAdapterRequest
from deployments.api.settings import ApiSettings
from deployments.service import AdapterCatalog, EngineService
from engine.adapters.names import check_adapter_name
from engine.errors import Conflict, InvalidRequest, ModelNotFound

S3 = "s3://"


class RuntimeLoading:
    def __init__(self, catalog: AdapterCatalog, settings: ApiSettings) -> None:
        self._catalog = catalog
        self._settings = settings

    async def load(self, body: LoadAdapterRequest) -> PlainTextResponse:
        name = self._checked_name(body.lora_name)
        uri = allowed_uri(body.lora_path, self._settings.allowed_uri_prefixes)
        try:
            if body.canary_weight is not None:
                await self._catalog.load_canary(name, uri, body.canary_weight)
            else:
                await self._catalog.load(name, uri, replace=body.load_inplace)
        except Conflict:
            raise Conflict(
                f"The lora adapter {name!r} has already been loaded. "
                "If you want to load the adapter in place, set 'load_inplace' to True.",
                param="lora_name",
            ) from None
        except ModelNotFound as error:
            if error.param == "lora_name":
                raise _unknown(name) from None
            raise ModelNotFound("no adapter at this lora_path", param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} added successfully.")

    async def unload(self, body: UnloadAdapterRequest) -> PlainTextResponse:
        name = self._checked_name(body.lora_name)
        try:
            await self._catalog.unload(name)
        except ModelNotFound:
            raise _unknown(name) from None
        return PlainTextResponse(f"Success: LoRA adapter {name!r} removed successfully.")

    def _checked_name(self, name: str) -> str:
        check_adapter_name(name, "lora_name")
        if name in self._settings.model_names:
            raise Conflict(f"{shown(name)} is the base model's name", param="lora_name")
        return name


class Pinning:
    """POST /v1/pin_lora_adapter and /v1/unpin_lora_adapter: whether it may be evicted where it is loaded."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def pin(self, body: PinAdapterRequest) -> PlainTextResponse:
        await self._set(body.lora_name, pinned=True)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} pinned.")

    async def unpin(self, body: PinAdapterRequest) -> PlainTextResponse:
        await self._set(body.lora_name, pinned=False)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} unpinned.")

    async def _set(self, name: str, *, pinned: bool) -> None:
        check_adapter_name(name, "lora_name")
        try:
            await self._service.pin_adapter(name, pinned)
        except ModelNotFound:
            raise ModelNotFound(f"The lora adapter {name!r} is not loaded.", param="lora_name") from None


def _unknown(name: str) -> ModelNotFound:
    return ModelNotFound(f"The lora adapter {name!r} cannot be found.", param="lora_name")


async def loading_is_off(request: Request) -> PlainTextResponse:
    raise HTTPException(403, "loading adapters at run time is off; it is enabled when the server starts")


def allowed_uri(path: str, prefixes: tuple[str, ...]) -> str:
    """The location, with symbolic links resolved. Raises InvalidRequest unless it is under a prefix."""
    if not path.isprintable():  # the file system takes no NUL and no half a surrogate pair
        raise InvalidRequest("lora_path is no location", param="lora_path")
    uri = path.rstrip("/") if path.startswith(S3) else os.path.realpath(path)
    if not any(_is_under(uri, prefix) for prefix in prefixes):
        raise InvalidRequest("lora_path is not under a location that is allowed", param="lora_path")
    return uri


def _is_under(uri: str, prefix: str) -> bool:
    if prefix.startswith(S3) != uri.startswith(S3):
        return False
    if not uri.startswith(S3):
        return Path(uri).is_relative_to(os.path.realpath(prefix))
    parts = uri.removeprefix(S3).split("/")
    plain = all(part not in ("", ".", "..") for part in parts)
    return plain and (uri + "/").startswith(prefix.rstrip("/") + "/")
