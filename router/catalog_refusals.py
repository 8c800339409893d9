"""What engines have refused: the same bytes are not tried again. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from engine.errors import AdapterRefused
from engine.request import AdapterRef


@dataclass(frozen=True, slots=True)
class Refusal:
    version: str
    message: str
    param: str | None  # the field or tensor

    def error(self) -> AdapterRefused:
        return AdapterRefused(self.message, param=self.param)


class Refusals:
    def __init__(self) -> None:
        self._by_uri: dict[str, Refusal] = {}  # the latest one

    def add(self, ref: AdapterRef, error: AdapterRefused) -> bool:
        """Whether it is news. A version that is not known cannot be told from the next one."""
        if not ref.version or self.get(ref) is not None:
            return False
        self._by_uri[ref.uri] = Refusal(ref.version, error.message, error.param)
        return True

    def get(self, ref: AdapterRef) -> Refusal | None:
        refusal = self._by_uri.get(ref.uri)
        return refusal if refusal is not None and refusal.version == ref.version else None

    def forget(self, uri: str) -> None:
        """It was loaded after all."""
        self._by_uri.pop(uri, None)

    def keep(self, uris: Set[str]) -> None:
        """Forget all others."""
        self._by_uri = {uri: refusal for uri, refusal in self._by_uri.items() if uri in uris}
