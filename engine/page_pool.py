"""Pool pages: who owns which. Knows nothing of tensors, of adapters' weights or of time.

One pool serves three kinds of owner, so that memory moves between them under load:

    | running sequences | prefix cache | adapters | free |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class PageKind(Enum):
    SEQUENCE = "sequence"  # KV of one running sequence
    PREFIX = "prefix"  # KV of full pages that later requests may share
    ADAPTER = "adapter"  # packed LoRA weights


class Owner(NamedTuple):
    kind: PageKind
    key: str  # request id, adapter digest; the prefix cache keys its pages itself


PREFIX_OWNER = Owner(PageKind.PREFIX, "")


class OutOfPages(Exception):
    """Nothing was allocated."""


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # KV gets the page freed last, while it is warm in the cache; an adapter those freed first, which no
        # step in flight touches any more, so that its copy need not wait
        self._free = deque(range(num_pages - 1, -1, -1))
        self._owner: list[Owner | None] = [None] * num_pages
        self._num_used = dict.fromkeys(PageKind, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_used(self, kind: PageKind) -> int:
        return self._num_used[kind]

    def can_allocate(self, num_pages: int) -> bool:
        return num_pages <= len(self._free)

    def allocate(self, owner: Owner, num_pages: int) -> tuple[int, ...]:
        """Take all the pages or none. Raises OutOfPages and changes nothing if they do not suffice."""
        if not self.can_allocate(num_pages):
            raise OutOfPages(f"{num_pages} pages wanted, {len(self._free)} free")
        if owner.kind is PageKind.ADAPTER:
            # in order: pages that follow each other are copied together
            page_ids = tuple(sorted(self._free.popleft() for _ in range(num_pages)))
        else:
            page_ids = tuple(self._free.pop() for _ in range(num_pages))
        for page_id in page_ids:
            self._owner[page_id] = owner
        self._num_used[owner.kind] += num_pages
        return page_ids

    def free(self, owner: Owner, page_ids: Iterable[int]) -> None:
        for page_id in page_ids:
            assert self._owner[page_id] == owner, f"page {page_id}: {self._owner[page_id]} != {owner}"
            self._owner[page_id] = None
            self._free.append(page_id)
            self._num_used[owner.kind] -= 1

    def transfer(self, page_id: int, old: Owner, new: Owner) -> None:
        assert self._owner[page_id] == old, f"page {page_id}: {self._owner[page_id]} != {old}"
        self._owner[page_id] = new
        self._num_used[old.kind] -= 1
        self._num_used[new.kind] += 1

    def pages_of(self, owner: Owner) -> frozenset[int]:
        """Recomputed by a scan: for checks and tests."""
        return frozenset(p for p, o in enumerate(self._owner) if o == owner)

    def check_invariants(self) -> None:
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._owner[p] is None for p in self._free), "a free page has an owner"
        for kind in PageKind:
            used = sum(o is not None and o.kind is kind for o in self._owner)
            assert used == self._num_used[kind], f"{kind}: counted {self._num_used[kind]}, really {used}"
        assert len(self._free) + sum(self._num_used.values()) == self.num_pages
