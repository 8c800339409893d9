"""Which model a request means: the base model or an adapter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deployments.api.http_errors import shown
from deployments.service import AdapterCatalog, AdapterRecord
from engine.adapters.names import MAX_NAME_LEN, check_adapter_name, is_adapter_name
from engine.errors import ModelNotFound
from engine.request import AdapterRef


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
    def __init__(
        self,
        base_names: Sequence[str],
        catalog: AdapterCatalog,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw`: numbers from 0 to below 1; they decide which requests a canary answers."""
        self._base_names = base_names
        self._catalog = catalog
        self._draw = draw

    async def resolve(self, model: str) -> ResolvedModel:
        """What answers a request. Raises as `find`, and AdapterRefused."""
        found = await self.find(model)
        if found.record and found.record.refusal:
            raise found.record.refusal
        canary = found.record.canary if found.record else None
        if canary is not None and self._draw() < canary.weight:
            return ResolvedModel(canary.record.ref.name, canary.record)
        return found

    async def find(self, model: str) -> ResolvedModel:
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
        if colon and is_adapter_name(base):
            raise model_not_found(model)
        return model
