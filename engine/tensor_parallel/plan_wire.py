"""A step plan as int32 numbers, from rank 0 to the others. Pure; nothing is pickled.

Requests and adapters go by number. Of a request's pages only those go that the other side does not know yet,
so that a step of decodes takes eight numbers a request.

    number of preempted, evictions, loads, chunks, freed pages
    preempted: request                              eviction: slot
    load: adapter, slot, after steps, pages, page...
    chunk: request, start, slot, samples, known pages, new pages, tokens, page..., token...
    freed page...
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator

from engine.memory import Eviction, EvictionCause
from engine.plan import AdapterLoad, PageIds, ScheduledChunk, StepPlan

_NO_PAGES: PageIds = array("i")


class PlanEncoder:
    """`freed_pages` are sent if they are to be filled with NaN."""

    def __init__(self, with_freed_pages: bool) -> None:
        self._with_freed_pages = with_freed_pages
        self._pages: dict[int, PageIds] = {}  # of each request, as the other side knows them

    def encode(self, plan: StepPlan, requests: dict[str, int], adapters: dict[str, int]) -> bytes:
        """`adapters`: numbers of the digests that the plan loads."""
        freed = plan.freed_pages if self._with_freed_pages else ()
        numbers = array(
            "i", (len(plan.preempted), len(plan.evictions), len(plan.loads), len(plan.chunks), len(freed))
        )
        numbers.extend(requests[request_id] for request_id in plan.preempted)
        numbers.extend(eviction.slot for eviction in plan.evictions)
        for load in plan.loads:
            numbers.extend((adapters[load.digest], load.slot, load.after_steps, len(load.page_ids)))
            numbers.extend(load.page_ids)
        for chunk in plan.chunks:
            request = requests[chunk.request_id]
            pages, tokens = chunk.page_ids, chunk.token_ids
            num_known = self._learn(request, pages)
            numbers.extend(
                (
                    request, chunk.start, chunk.adapter_slot, chunk.samples,
                    num_known, len(pages) - num_known, len(tokens),
                )
            )  # fmt: skip
            numbers.extend(pages[num_known:])
            numbers.extend(tokens)
        numbers.extend(freed)
        return numbers.tobytes()

    def forget(self, request: int) -> None:
        self._pages.pop(request, None)

    def _learn(self, request: int, pages: PageIds) -> int:
        """How many of the first pages the other side knows already."""
        known = self._pages.get(request, _NO_PAGES)
        self._pages[request] = pages
        if pages[: len(known)] == known:
            return len(known)
        # a page gave way to a shared one with the same content, or the request was preempted
        same = (ours == theirs for ours, theirs in zip(pages, known, strict=False))
        return next((i for i, is_same in enumerate(same) if not is_same), min(len(pages), len(known)))


class PlanDecoder:
    def __init__(self) -> None:
        self._pages: dict[int, PageIds] = {}

    def decode(self, payload: bytes) -> StepPlan:
        """Requests and digests are named by their numbers."""
        numbers = array("i")
        numbers.frombytes(payload)
        rest = iter(numbers)
        num_preempted, num_evictions, num_loads, num_chunks, num_freed = _take(rest, 5)
        preempted = tuple(map(str, _take(rest, num_preempted)))
        evictions = tuple(Eviction("", slot, (), EvictionCause.PAGES) for slot in _take(rest, num_evictions))
        loads = tuple(_load(rest) for _ in range(num_loads))
        chunks = tuple(self._chunk(rest) for _ in range(num_chunks))
        return StepPlan(evictions, _take(rest, num_freed), loads, chunks, (), preempted, ())

    def forget(self, request: int) -> None:
        self._pages.pop(request, None)

    def _chunk(self, rest: Iterator[int]) -> ScheduledChunk:
        request, start, slot, samples, num_known, num_new, num_tokens = _take(rest, 7)
        pages = self._pages.get(request, _NO_PAGES)[:num_known]
        pages.extend(_take(rest, num_new))
        self._pages[request] = pages
        return ScheduledChunk(str(request), start, _take(rest, num_tokens), pages, slot, bool(samples))


def _load(rest: Iterator[int]) -> AdapterLoad:
    adapter, slot, after_steps, num_pages = _take(rest, 4)
    return AdapterLoad(str(adapter), slot, _take(rest, num_pages), bool(after_steps))


def _take(rest: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(rest, count))
