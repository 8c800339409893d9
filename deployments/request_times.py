"""What one request took at its replica. Pure: time comes in as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.request import OutputDelta


def placed(deltas: Sequence[OutputDelta], replica: str, route: str, epoch: float) -> list[OutputDelta]:
    """With milestones that another machine understands. `epoch`: when the engine's clock was zero."""
    return [
        delta
        if (told := delta.milestones) is None
        else replace(
            delta,
            milestones=replace(
                told,
                arrived=epoch + told.arrived,
                loaded=epoch + told.loaded,
                started=epoch + told.started,
                first_token=epoch + told.first_token,
                replica=replica,
                route=route,
            ),
        )
        for delta in deltas
    ]


@dataclass(slots=True)
class RequestTimes:
    arrived: float
    unfinished: int = 1  # choices
    first: float | None = None  # when its first token came
    last: float = 0.0
    num_tokens: int = 0  # of its longest choice
    finish_reason: str | None = None  # of the choice that ended last, once all have

    def saw(self, deltas: Sequence[OutputDelta], now: float) -> None:
        if self.first is None:
            self.first = now
        self.last = now
        for delta in deltas:
            self.num_tokens = max(self.num_tokens, delta.num_output_tokens)
            self.unfinished -= delta.finish_reason is not None
            if not self.unfinished:
                self.finish_reason = delta.finish_reason

    @property
    def seconds_per_token(self) -> float | None:
        """After the first one; None if there is no other."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)
