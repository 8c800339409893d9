"""What the HTTP layer sees of the fleet: an engine service and a catalog of adapters.

Two protocols, so that the API runs in process over fakes. Knows nothing of HTTP or Ray.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import AdapterRefused
from engine.request import AdapterRef, GenerateRequest, OutputDelta


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """A desired adapter, as every ingress replica lists it."""

    ref: AdapterRef
    chat_template: str | None  # the adapter's own; None: the base model's is used
    root: str  # where it comes from, as shown to clients
    state: str = "ready"  # or loading, pending, failed
    reason: str | None = None  # why it failed
    canary: CanaryRecord | None = None
    refusal: AdapterRefused | None = None  # of just this version: no engine need be asked


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """Another version under the same name."""

    record: AdapterRecord
    weight: float  # part of the name's requests that it answers


class TokenSource(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncIterator[list[OutputDelta]]:
        """Raises before the first item where it can. Closing the iterator (`aclose`) aborts the request.

        The first item tells that the first token has come, also where it is empty.
        """


async def close(stream: AsyncIterator[list[OutputDelta]]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


class EngineService(TokenSource, Protocol):
    """The fleet's engines as one. Every method may raise a LorafleetError."""

    @property
    def whole(self) -> TokenSource:
        """For answers that are shown whole: gives no delta before the end, so that it may begin anew."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    async def pin_adapter(self, name: str, pinned: bool) -> None:
        """Keep it in the pool where it is loaded, or no longer. Raises ModelNotFound or Conflict."""

    async def metrics_text(self) -> str:
        """As `deployments.metrics` renders it. Does not raise for want of a replica."""

    async def stats(self) -> dict[str, Any]:
        """`{"replicas": [...]}`, each as `deployments.metrics` tells, with all adapters. It may be empty."""

    async def check_health(self) -> None:
        """Raises Unavailable if no request could be served now."""


@dataclass(frozen=True, slots=True)
class TokenSources:
    streamed: TokenSource
    whole: TokenSource

    def source(self, stream: bool | None) -> TokenSource:
        """`stream`: as a client asks for it."""
        return self.streamed if stream else self.whole


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    kept: str  # where run-time loads are: see router.catalog_state.Kept
    states: Mapping[str, int]  # adapters by state


class AdapterCatalog(Protocol):
    """The desired adapters, the same on every ingress replica."""

    async def resolve(self, name: str) -> AdapterRecord:
        """Raises ModelNotFound, or Unavailable while the catalog cannot tell."""

    async def list(self, prefix: str, after: str, limit: int) -> list[AdapterRecord]:
        """At most so many, by name: those that begin with `prefix` and come behind `after`."""

    def facts(self) -> CatalogFacts: ...

    async def load(self, name: str, uri: str, *, replace: bool) -> None:
        """Returns when every ingress replica can resolve the name.

        Raises Conflict if the name is taken and not `replace`, ModelNotFound if nothing is at `uri`,
        AdapterRefused if it cannot be served, Unavailable while another load of that name is under way.
        """

    async def load_canary(self, name: str, uri: str, weight: float) -> None:
        """Answer a part of the name's requests from `uri`; a weight of 0 ends that. Raises as `load`."""

    async def unload(self, name: str) -> None:
        """Raises ModelNotFound."""
