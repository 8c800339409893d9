"""The chat templates that adapters bring, each version's read once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from engine.request import AdapterRef
from router.shared_calls import SharedCalls


class Templates:
    def __init__(self, read: Callable[[str], str | None]) -> None:
        """`read` blocks and takes the URI of one adapter."""
        self._read = read
        self._texts: dict[AdapterRef, str | None] = {}
        self._reads = SharedCalls[AdapterRef, str | None]()

    async def get(self, ref: AdapterRef) -> str | None:
        """None: it brings none. Raises what `read` raises."""
        if ref not in self._texts:
            # a new adapter is often asked for by many at once
            self._texts[ref] = await self._reads.get(ref, lambda: asyncio.to_thread(self._read, ref.uri))
        return self._texts[ref]

    def keep(self, refs: Set[AdapterRef]) -> None:
        """Forget all others."""
        self._texts = {ref: text for ref, text in self._texts.items() if ref in refs}
