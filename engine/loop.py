"""Drives an EngineCore on one thread; other threads hand it calls through an inbox."""

from __future__ import annotations

import queue
from collections.abc import Callable

from engine.core import EngineCore
from engine.events import Event

Call = Callable[[], None]
Inbox = queue.SimpleQueue[Call]

STALLED_WAIT_S = 0.02  # a request may become starving by time alone, so a stalled loop looks again


class EngineLoop:
    def __init__(self, core: EngineCore, inbox: Inbox) -> None:
        self.core = core
        self.has_worked = False  # the last turn took a call or ran a step
        self._inbox = inbox

    def turn(self, idle_wait_s: float) -> list[Event]:
        """Take the calls that are there, run one step if there is work. Waits only when there is none."""
        self.has_worked = self._take_calls(idle_wait_s)
        if not self.core.is_idle:
            self.core.step()
            self.has_worked = True
        return self.core.take_events()

    def _take_calls(self, idle_wait_s: float) -> bool:
        """Whether there was any."""
        has_taken = False
        wait_s = 0.0
        if self.core.is_idle:
            wait_s = idle_wait_s
        elif self.core.is_stalled:
            wait_s = STALLED_WAIT_S
        try:
            call = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                call()
                has_taken = True
                call = self._inbox.get_nowait()
        except queue.Empty:
            return has_taken
