"""What is lost least when it goes: one order for the pool and for host memory. Pure: no tensors, no clock.

    worth = log2(uses * seconds to have it back / pages) + now / half life

`uses` fades: a use counts half after each half life (LRFU, Lee et al. 2001), so frequency and recency are one
number. All uses fade alike, so the order of two things changes only when one of them is used; the second term
takes the place of fading all the others, and worths of any age compare.

An adapter comes back from host memory or, much later, from its source; KV of a prefix comes back by computing
it. Seconds a page are what makes the three comparable.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

Policy = Literal["score", "lru"]

MAX_REMEMBERED = 1 << 14
"""Adapters whose uses are remembered, resident or not."""

_LEAST_USES = 2.0**-1000  # above 0: of uses a day ago nothing is left that a float can tell

NEVER_USED = 4.0
"""So many half lives older than one that was used once is an adapter copied ahead of its first use."""


@dataclass(frozen=True, slots=True)
class ReloadCosts:
    """Seconds. Measured for pages of 2 MiB and an 8B model on an H200; only their ratios matter."""

    copy_page_s: float = 2 * 2**20 / 50e9  # from pinned host memory
    copy_s: float = 1e-3  # for any copy; most of one hides behind the step in flight
    read_page_s: float = 2 * 2**20 / 1e9  # from S3
    read_s: float = 50e-3
    prefill_page_s: float = 16 / 40e3  # compute the KV of a page

    def of_pool(self, page_bytes: int, page_tokens: int) -> ReloadCosts:
        """For pages of other sizes."""
        by_bytes, by_tokens = page_bytes / (2 * 2**20), page_tokens / 16
        return ReloadCosts(
            self.copy_page_s * by_bytes,
            self.copy_s,
            self.read_page_s * by_bytes,
            self.read_s,
            self.prefill_page_s * by_tokens,
        )


@dataclass(slots=True)
class _Uses:
    count: float  # faded to `last_used`
    last_used: float
    was_used: bool  # or somebody is about to; else it was only loaded


class EvictionOrder:
    """Worths of adapters and of prefix pages; the lowest goes first. Times passed in never go back.

    With "lru" a worth is the time of the last use, and nothing else.
    """

    def __init__(
        self,
        policy: Policy = "score",
        half_life_s: float = 60.0,
        costs: ReloadCosts | None = None,
        in_host: Container[str] | None = None,
    ) -> None:
        """`in_host`: digests whose image is in host memory; None: all are. Their owner may set it later."""
        self._policy = policy
        self._half_life_s = half_life_s
        self._costs = costs or ReloadCosts()
        self.in_host = in_host
        self._uses: OrderedDict[str, _Uses] = OrderedDict()  # by last use

    def used(self, digest: str, now: float, count: float = 1.0) -> None:
        """`count` 0: loaded for uses to come. What is new counts as used once: it is not the first to go."""
        uses = self._uses.get(digest)
        if uses is None:
            self._uses[digest] = _Uses(max(1.0, count), now, count > 0.0)
            if len(self._uses) > MAX_REMEMBERED:
                self._uses.popitem(last=False)
            return
        faded = uses.count * 0.5 ** ((now - uses.last_used) / self._half_life_s)
        uses.count = max(count + faded, _LEAST_USES)
        uses.last_used = now
        uses.was_used = uses.was_used or count > 0.0
        self._uses.move_to_end(digest)

    def expected(self, digest: str, now: float) -> None:
        """Somebody is about to use it: until then it counts as used once, if it never was."""
        self.used(digest, now, count=0.0)
        self._uses[digest].was_used = True

    def resident_adapter(self, digest: str, num_pages: int) -> float:
        """Its pages in the pool; it comes back from host memory if it is there."""
        costs = self._costs
        if self.in_host is None or digest in self.in_host:
            seconds_a_page = costs.copy_page_s + costs.copy_s / num_pages
        else:
            seconds_a_page = costs.read_page_s + costs.read_s / num_pages
        return self._worth(digest, seconds_a_page)

    def ahead_of_use(self, digest: str, num_pages: int) -> float:
        """The same if nobody has asked for that copy: what was never used is worth little."""
        worth = self.resident_adapter(digest, num_pages)
        uses = self._uses.get(digest)
        if uses is None or uses.was_used:
            return worth
        return worth - NEVER_USED * (self._half_life_s if self._policy == "lru" else 1.0)

    def host_image(self, digest: str, num_pages: int) -> float:
        """Its image in host memory; it comes back from the source."""
        return self._worth(digest, self._costs.read_page_s + self._costs.read_s / num_pages)

    def prefix_page(self, last_used: float, reuse: float) -> float:
        """`reuse`: how often a page is used again, on average; most prompts never come back."""
        if self._policy == "lru":
            return last_used
        return math.log2(reuse * self._costs.prefill_page_s) + last_used / self._half_life_s

    def _worth(self, digest: str, seconds_a_page: float) -> float:
        uses = self._uses.get(digest)
        if uses is None:  # forgotten: longer ago than all that are remembered
            return -math.inf
        if self._policy == "lru":
            return uses.last_used
        return math.log2(uses.count * seconds_a_page) + uses.last_used / self._half_life_s
