"""GET /v1/models: the base model first, then the adapters by name, all of them or a page.

Clients of OpenAI know no pages, so without a limit everything is told. Cards are made and encoded a few
hundred at a time: ten thousand take 60 ms, in which no stream of this process would move.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

from deployments.api.model_resolver import ModelResolver
from deployments.api.settings import ApiSettings
from deployments.service import AdapterCatalog, AdapterRecord
from engine.adapters.names import MAX_NAME_LEN

MAX_LIMIT = 1000
PIECE = 250  # adapters made at once

Name = Annotated[
    str, Query(max_length=2 * MAX_NAME_LEN)
]  # a base model's name may be longer than an adapter's


class Models:
    def __init__(self, catalog: AdapterCatalog, resolver: ModelResolver, settings: ApiSettings) -> None:
        self._catalog = catalog
        self._resolver = resolver
        self._settings = settings

    async def list(
        self,
        limit: Annotated[int | None, Query(ge=1, le=MAX_LIMIT)] = None,
        after: Name = "",
        prefix: Name = "",
    ) -> Response:
        """Those whose ids begin with `prefix` and come behind `after`, the last id of the page before."""
        cards: list[dict[str, Any]] = []
        has_more = False
        piece = PIECE if limit is None else min(PIECE, limit + 1)
        async with aclosing(self._cards(prefix, after, piece)) as found:
            async for card in found:
                if len(cards) == limit:
                    has_more = True
                    break
                cards.append(card)
        ids = [card["id"] for card in cards[:1] + cards[-1:]] or [None]
        ends = _encode({"has_more": has_more, "first_id": ids[0], "last_id": ids[-1]})
        body = f'{{"object":"list","data":[{await _encode_all(cards)}],{ends[1:]}'
        return Response(body, media_type="application/json")

    async def get(self, model: str) -> dict[str, Any]:
        resolved = await self._resolver.find(model)
        if resolved.record is None:
            return self._base_card(resolved.name)
        return self._adapter_card(resolved.record)

    async def _cards(self, prefix: str, after: str, piece: int) -> AsyncGenerator[dict[str, Any], None]:
        """`piece`: adapters that are asked for at once."""
        names = self._settings.model_names
        if not after or after in names:
            for name in names[names.index(after) + 1 if after else 0 :]:
                if name.startswith(prefix):
                    yield self._base_card(name)
            after = ""
        while records := await self._catalog.list(prefix, after, piece):
            for record in records:
                if (
                    record.ref.name not in names
                ):  # such an adapter cannot be asked for, and a page ends at a name
                    yield self._adapter_card(record)
            after = records[-1].ref.name
            await asyncio.sleep(0)

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


async def _encode_all(cards: list[dict[str, Any]]) -> str:
    """Joined by commas."""
    pieces = []
    for first in range(0, len(cards), PIECE):
        pieces.append(_encode(cards[first : first + PIECE])[1:-1])
        await asyncio.sleep(0)
    return ",".join(pieces)


def _encode(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
