"""When the device will be through with the step in flight, and what steps cost, from the last ones. Pure."""

from __future__ import annotations

from collections import deque

from engine.step_cost import StepCostFit, StepWork


class StepClock:
    def __init__(self) -> None:
        self.costs = StepCostFit()
        self._step_s = 0.0
        self._began: float | None = None  # the oldest step in flight, as far as the host can know
        self._in_flight: deque[StepWork | None] = deque()

    def submitted(self, now: float, work: StepWork | None = None) -> None:
        """`work`: None if the step does none, or says nothing of what steps cost."""
        self._in_flight.append(work)
        if self._began is None:
            self._began = now

    def collected(self, now: float, is_last: bool) -> float | None:
        """Returns the seconds that it took, if it did work.

        `is_last`: no step is in flight any more; else the next one begins now.
        """
        assert self._began is not None
        seconds = now - self._began
        work = self._in_flight.popleft()
        if work is not None:
            self.costs.observe(work, seconds)
        # the newest step tells most: steps of one kind follow each other
        self._step_s += 0.5 * (seconds - self._step_s)
        self._began = None if is_last else now
        return None if work is None else seconds

    def free_at(self, now: float) -> float:
        return now if self._began is None else max(now, self._began + self._step_s)
