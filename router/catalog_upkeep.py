"""How far each named adapter is: confirmed, or when to try again. Pure: time comes in as `now`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# loading: asked for at run time and on its way; requests are told to come again
# pending: wanted, and not confirmed yet; requests are taken, and may find it cold
State = Literal["loading", "pending", "ready", "failed"]

RETRY_S = 1.0  # doubled each time
MAX_RETRY_S = 30.0
FOLLOW_S = 30.0  # until one that is ready is looked at again, for a new version


def retry_delay_s(failures: int) -> float:
    """Capped exponential; `failures` in a row, at least one."""
    return min(MAX_RETRY_S, RETRY_S * 2.0 ** min(failures - 1, 16))


@dataclass(frozen=True, slots=True)
class Status:
    state: State = "ready"
    reason: str | None = None  # why it failed


@dataclass(slots=True)
class _Book:
    uri: str
    version: str = ""  # the newest that requests may ask for
    is_confirmed: bool = False  # it is at the source, and on the replicas if it ought to be there
    looked_at: float = float("-inf")  # when it was found at the source, if it is confirmed
    failures: int = 0
    reason: str | None = None
    due: float = float("-inf")


class Upkeep:
    """`looked_at`: when an attempt began. How it ends is no news if one that began later has succeeded."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def want(self, uris: Mapping[str, str]) -> None:
        """Name -> URI of all that is named. One that means another place starts again."""
        kept = {name: book for name, book in self._books.items() if uris.get(name) == book.uri}
        self._books = {name: kept.get(name) or _Book(uri) for name, uri in uris.items()}

    def due(self, now: float) -> list[tuple[str, str]]:
        """(name, URI) of those to be looked at, longest due first."""
        late = [(book.due, name, book.uri) for name, book in self._books.items() if book.due <= now]
        return [(name, uri) for _, name, uri in sorted(late)]

    def version(self, name: str) -> str:
        """Empty: not known, as of a name that is wanted no more."""
        book = self._books.get(name)
        return book.version if book is not None else ""

    def described(self, name: str, uri: str, version: str) -> None:
        """What is at its source now. Requests ask for it at once if nothing was confirmed before."""
        if (book := self._books.get(name)) and book.uri == uri and not book.is_confirmed:
            book.version = version

    def expect(self, name: str, uri: str, version: str) -> None:
        """Requests ask for that version from now on; it is not confirmed yet."""
        if name in self._books:
            self._books[name] = _Book(uri, version)

    def is_confirmed(self, name: str, version: str) -> bool:
        book = self._books.get(name)
        return book is not None and book.is_confirmed and book.version == version

    def succeeded(self, name: str, uri: str, version: str, looked_at: float, now: float) -> None:
        if self._is_news(name, uri, looked_at):
            self._books[name] = _Book(uri, version, True, looked_at, due=now + FOLLOW_S)

    def failed(
        self, name: str, uri: str, reason: str, looked_at: float, now: float, is_refused: bool = False
    ) -> None:
        """What was confirmed before goes on being asked for. `is_refused`: it will be again."""
        if self._is_news(name, uri, looked_at):
            book = self._books[name]
            book.failures += 1
            book.reason = reason
            book.due = now + (FOLLOW_S if is_refused else retry_delay_s(book.failures))

    def put_off(self, name: str, uri: str, now: float) -> None:
        """Nobody could be asked. That is no failure."""
        if (book := self._books.get(name)) and book.uri == uri:
            book.due = now + RETRY_S

    def status(self, name: str) -> Status:
        book = self._books.get(name)
        if book is None:
            return Status()
        if book.failures:
            return Status("failed", book.reason)
        return Status("ready" if book.is_confirmed else "pending")

    def _is_news(self, name: str, uri: str, looked_at: float) -> bool:
        book = self._books.get(name)
        return book is not None and book.uri == uri and looked_at >= book.looked_at
