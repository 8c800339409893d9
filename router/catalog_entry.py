"""What the catalog tells of each adapter."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import Unavailable
from engine.request import AdapterRef
from router.catalog_upkeep import Status


@dataclass(frozen=True, slots=True)
class Canary:
    ref: AdapterRef
    weight: float  # part of the requests that it answers


@dataclass(frozen=True, slots=True)
class Entry:
    ref: AdapterRef
    status: Status
    canary: Canary | None = None

    def refs(self) -> tuple[AdapterRef, ...]:
        return (self.ref, self.canary.ref) if self.canary else (self.ref,)


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: str  # versions of two catalogs do not compare
    version: int
    entries: tuple[Entry, ...]  # by name


def canary_name(name: str) -> str:
    """No client can ask for it: the grammar of names has no such sign. Metrics and answers show it."""
    return f"{name}@canary"


def refuse_while_loading(entry: Entry) -> None:
    """Neither unknown nor the base model's answer. Raises Unavailable."""
    if entry.status.state == "loading":
        raise is_loading(entry.ref.name)


def is_loading(name: str) -> Unavailable:
    return Unavailable(f"the adapter {name!r} is being loaded", retry_after_s=1.0)
