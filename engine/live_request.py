"""A request that the engine has accepted and that has not ended."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import GenerateRequest, Milestones
from engine.sequence import Sequence


@dataclass(slots=True)
class LiveRequest:
    """`seq` is None while its adapter is being read."""

    request: GenerateRequest
    arrival: int
    arrived: float
    seq: Sequence | None = None
    tier: str | None = None  # where its adapter was found
    loaded: float | None = None  # when its adapter had been read, if it had to be
    started: float | None = None  # when it was first scheduled

    @property
    def is_started(self) -> bool:
        return self.seq is not None and (self.seq.is_running or self.seq.num_outputs > 0)

    def milestones(self, now: float) -> Milestones:
        """`now`: when its first token came."""
        assert self.started is not None
        return Milestones(self.arrived, self.loaded or self.arrived, self.started, now, self.tier)

    @property
    def name(self) -> str | None:
        return self.request.adapter.name if self.request.adapter else None
