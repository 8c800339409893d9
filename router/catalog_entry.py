"""What the catalog tells of each adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import Unavailable
from engine.request import AdapterRef
from router.catalog_refusals import Refusal
from router.catalog_state import Kept
from router.catalog_upkeep import Status

_CANARY = "@canary"  # no client can ask for it: the grammar of names has no such sign


@dataclass(frozen=True, slots=True)
class Canary:
    ref: AdapterRef
    weight: float  # part of the requests that it answers


@dataclass(frozen=True, slots=True)
class Entry:
    ref: AdapterRef
    status: Status
    canary: Canary | None = None
    refusal: Refusal | None = None  # of just this version: no engine is asked for it

    def refs(self) -> tuple[AdapterRef, ...]:
        return (self.ref, self.canary.ref) if self.canary else (self.ref,)


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: str  # versions of two catalogs do not compare
    version: int
    kept: Kept
    is_whole: bool  # else it tells what has changed since the version that was asked with
    entries: tuple[Entry, ...]
    gone: tuple[str, ...] = ()  # names; of changes only

    def applied_to(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """What there is now, sorted by name. `entries`: what there was at the version that was asked with."""
        told = {entry.ref.name: entry for entry in self.entries}
        if not self.is_whole:
            if not told and not self.gone:
                return entries
            told = {**entries, **told}
            for name in self.gone:
                told.pop(name, None)
        return dict(sorted(told.items()))


def canary_name(name: str) -> str:
    """Metrics and answers show it."""
    return f"{name}{_CANARY}"


def shared_name(name: str) -> str:
    """Of an adapter or a canary: the one that clients ask for."""
    return name.removesuffix(_CANARY)


def refuse_while_loading(entry: Entry) -> None:
    """Neither unknown nor the base model's answer. Raises Unavailable."""
    if entry.status.state == "loading":
        raise is_loading(entry.ref.name)


def is_loading(name: str) -> Unavailable:
    return Unavailable(f"the adapter {name!r} is being loaded", retry_after_s=1.0)
