"""Which model a request means: the base model or an adapter. Owns the grammar of names.

An adapter's name is one or more parts joined by `/`; a part holds letters, digits, `.`, `_` and `-` and
starts with a letter, a digit or `_`. So no name is a path that leads out of its root, and none needs
escaping in a URL, a log line or a metric label.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.http_errors import shown
from deployments.service import AdapterCatalog, AdapterRecord
from engine.errors import InvalidRequest, ModelNotFound
from engine.request import AdapterRef

MAX_NAME_LEN = 128
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")


def check_adapter_name(name: str, param: str) -> None:
    """Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{param}: {shown(name)} is not a well-formed name", param=param)


def model_not_found(name: str) -> ModelNotFound:
    return ModelNotFound(f"The model {shown(name)} does not exist.", param="model")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str  # of what answers; echoed to the client
    record: AdapterRecord | None  # None: the base model

    @property
    def adapter(self) -> AdapterRef | None:
        return self.record.ref if self.record else None

    @property
    def chat_template(self) -> str | None:
        return self.record.chat_template if self.record else None


class ModelResolver:
    def __init__(self, base_names: Sequence[str], catalog: AdapterCatalog) -> None:
        self._base_names = base_names
        self._catalog = catalog

    async def resolve(self, model: str) -> ResolvedModel:
        """`base`, `adapter` or `base:adapter`. Raises ModelNotFound, InvalidRequest or Unavailable."""
        if model in self._base_names:
            return ResolvedModel(model, None)
        name = self._adapter_name(model)
        if not name or len(name) > MAX_NAME_LEN:
            raise model_not_found(model)
        check_adapter_name(name, "model")
        try:
            record = await self._catalog.resolve(name)
        except ModelNotFound:
            raise model_not_found(model) from None
        return ResolvedModel(record.ref.name, record)

    def _adapter_name(self, model: str) -> str:
        for base in self._base_names:  # a base name may hold a colon itself
            if model.startswith(f"{base}:"):
                return model.removeprefix(f"{base}:")
        base, colon, _ = model.rpartition(":")
        if colon and _NAME.fullmatch(base):
            raise model_not_found(model)
        return model
