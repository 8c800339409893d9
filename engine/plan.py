"""What one step does: the scheduler decides it, the runner applies it. Frozen values.

Plans may be made and submitted ahead of the results of the step before: a token that this step will sample is
then PENDING in the plan, and the runner puts it in.

What there is one of for each row of each step is a tuple: a frozen dataclass takes more than twice as long.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from engine.memory import Eviction

PageIds: TypeAlias = "array[int]"
"""int32. A step takes one for each of its rows, as long as the row's context: copied, they cost nothing."""

PENDING = -1
"""Stands for a token that an earlier step samples and that the host does not know yet."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Copy an adapter from host memory; beside the steps in flight, unless they may still touch its pages."""

    digest: str
    slot: int
    page_ids: tuple[int, ...]
    after_steps: bool


class ScheduledChunk(NamedTuple):
    """Tokens [start, start + len(token_ids)) of one request; `samples`: its next token is wanted."""

    request_id: str
    start: int
    token_ids: tuple[int, ...]  # the last one may be PENDING
    page_ids: PageIds  # its own: nobody changes it
    adapter_slot: int  # -1: none
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Apply in this order: evictions and freed pages, loads, chunks."""

    evictions: tuple[Eviction, ...]
    freed_pages: tuple[int, ...]
    loads: tuple[AdapterLoad, ...]
    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    missing: tuple[str, ...]  # digests whose image must be read again before their requests can start

    @property
    def num_tokens(self) -> int:
        return sum([len(chunk.token_ids) for chunk in self.chunks])
