"""Requests that must have their first token by some time. Pure; `now` comes in.

They are refused at arrival if that looks hopeless, and given up when the time has passed. The wait is the
work that goes before, at the rate of late: the own requests in the queue, and as much of every other
account: fairness lets no more pass. Work is in weighted tokens, as in `engine.waiting`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from engine.errors import Overloaded
from engine.sequence import Sequence
from engine.waiting import INPUT_WEIGHT, OUTPUT_WEIGHT

_HALF_LIFE_S = 5.0
_LONGEST_STEP_S = 1.0  # after a longer pause there was nothing to do
_OUTPUTS_REMEMBERED = 32


class Deadlines:
    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}  # by request
        self._heap: list[tuple[float, str]] = []  # of these, and of some that were forgotten
        self._ahead: defaultdict[str, float] | None = None  # work in the queue, as the last step left it
        self._work = 0.0  # weighted tokens, fading
        self._seconds = 0.0
        self._last: float | None = None
        self._mean_outputs: float | None = None

    def add(self, request_id: str, deadline: float) -> None:
        self._deadlines[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 64 + 2 * len(self._deadlines):
            self._heap = [(deadline, request_id) for request_id, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def forget(self, request_id: str) -> None:
        """It has ended, if it had a deadline at all."""
        self._deadlines.pop(request_id, None)

    def take_passed(self, now: float) -> list[str]:
        """Whose time has passed; they may have started meanwhile."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._deadlines.get(request_id) == deadline:
                del self._deadlines[request_id]
                passed.append(request_id)
        return passed

    def queued(self, seq: Sequence) -> None:
        """Another request waits."""
        if self._ahead is not None:
            self._ahead[seq.namespace] += self._work_of(seq)

    def served(self, num_inputs: int, num_outputs: int, now: float, is_queued: bool = True) -> None:
        """A step was planned. `is_queued`: requests wait, so that it tells of the rate."""
        self._ahead = None
        if not is_queued:
            return
        pause = 0.0 if self._last is None else now - self._last
        self._last = now
        if pause <= _LONGEST_STEP_S:
            fade = 0.5 ** (pause / _HALF_LIFE_S)
            self._seconds = self._seconds * fade + pause
            self._work = self._work * fade + INPUT_WEIGHT * num_inputs + OUTPUT_WEIGHT * num_outputs

    def ended(self, num_outputs: int) -> None:
        """A request ended with so many tokens."""
        if self._mean_outputs is None:
            self._mean_outputs = num_outputs
        self._mean_outputs += (num_outputs - self._mean_outputs) / _OUTPUTS_REMEMBERED

    def expected_wait_s(self, namespace: str, num_inputs: int, waiting: Iterable[Sequence]) -> float:
        """Of a new request, until it starts and its prompt is computed; 0 while nothing is known.

        `waiting` is looked at once a step: with a long queue that takes about a millisecond.
        """
        if self._ahead is None:
            self._ahead = defaultdict(float)
            for seq in waiting:
                self.queued(seq)
        if not self._ahead or not self._work:
            return 0.0
        queued = self._ahead.get(namespace, 0.0)
        own = queued + INPUT_WEIGHT * num_inputs
        total = own + sum(min(work, own) for work in self._ahead.values()) - queued
        return total * self._seconds / self._work

    def check(self, namespace: str, num_inputs: int, timeout_s: float, waiting: Iterable[Sequence]) -> None:
        """Raises Overloaded if the first token is not to be expected in time."""
        wait_s = self.expected_wait_s(namespace, num_inputs, waiting)
        if wait_s > timeout_s:
            raise Overloaded(
                f"the first token is expected in {wait_s:.1f} s, asked for within {timeout_s:g} s",
                param="timeout_s",
                retry_after_s=wait_s - timeout_s,
            )

    def _work_of(self, seq: Sequence) -> float:
        most = seq.max_tokens - seq.num_outputs
        num_outputs = most if self._mean_outputs is None else min(most, self._mean_outputs)
        return INPUT_WEIGHT * seq.num_uncomputed + OUTPUT_WEIGHT * num_outputs
