"""GET /v1/models: the base model first, then the adapters by name."""

from __future__ import annotations

from typing import Any

from deployments.api.model_resolver import ModelResolver
from deployments.api.settings import ApiSettings
from deployments.service import AdapterCatalog, AdapterRecord


class Models:
    def __init__(self, catalog: AdapterCatalog, resolver: ModelResolver, settings: ApiSettings) -> None:
        self._catalog = catalog
        self._resolver = resolver
        self._settings = settings

    async def list(self) -> dict[str, Any]:
        records = sorted(await self._catalog.list(), key=lambda record: record.ref.name)
        base = [self._base_card(name) for name in self._settings.model_names]
        return {"object": "list", "data": base + [self._adapter_card(record) for record in records]}

    async def get(self, model: str) -> dict[str, Any]:
        resolved = await self._resolver.find(model)
        if resolved.record is None:
            return self._base_card(resolved.name)
        return self._adapter_card(resolved.record)

    def _base_card(self, name: str) -> dict[str, Any]:
        return self._card(name, root=self._settings.root or self._settings.model_names[0], parent=None)

    def _adapter_card(self, record: AdapterRecord) -> dict[str, Any]:
        card = self._card(record.ref.name, root=record.root, parent=self._settings.model_names[0])
        if record.canary is not None:
            card["canary_weight"] = record.canary.weight
        return card | {"state": record.state} | ({"reason": record.reason} if record.reason else {})

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._settings.created,
            "owned_by": "lorafleet",
            "root": root,
            "parent": parent,
            "max_model_len": self._settings.max_model_len,
        }
