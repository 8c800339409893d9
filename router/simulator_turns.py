"""A simulated fleet whose routers let requests wait as `router.residency_router` does: in turns, with hints.

`router.simulator` compares rules, most of which know neither; it tries again a little later.
"""

from __future__ import annotations

from router.hints import Hints, Waiting
from router.policy import RouteRequest
from router.simulator import RETRY_S, Fleet, Setup
from router.simulator_replica import Request
from router.simulator_rules import Ours
from router.turns import Turns

LOOK_AGAIN_S = 0.05


class _Router:
    """Who waits in one."""

    def __init__(self, rule: Ours) -> None:
        self.rule = rule
        self.turns: Turns[Request] = Turns()
        self.hints = Hints(rule.policy)
        self.is_looking = False


class TurnsFleet(Fleet):
    def __init__(self, setup: Setup, seed: int = 0, with_hints: bool = True) -> None:
        super().__init__(setup, Ours, seed)
        self.num_hints = 0
        self._with_hints = with_hints
        self._routers = [_Router(rule) for rule in self._rules if isinstance(rule, Ours)]

    def _route(self, request: Request, now: float) -> None:
        router = self._routers[request.router]
        if not router.turns and router.rule.table.num_free:
            self._enter(request, now)
            return
        request.num_retries += 1
        router.turns.add(request.adapter, request)
        if router.turns.num_adapters <= router.hints.num_ahead:
            self._hint(router, [request], now)
        if not router.is_looking:
            self._look_later(router, now)

    def _enter(self, request: Request, now: float) -> None:
        """It has its turn; the replica that is best for it may be full all the same."""
        if not self._place(request, now):
            request.num_retries += 1
            self._at(now + RETRY_S, lambda then: self._enter(request, then))

    def _place(self, request: Request, now: float) -> bool:
        rule = self._rules[request.router]
        if not self._replicas:
            return False
        order, reason = rule.choose(_asked(request), now)
        for replica_id in order:
            replica = self._replicas[replica_id]
            if replica.accepts():
                self._send(request, replica, reason, now)
                return True
            rule.table.answered(replica_id, len(replica.requests), now)
        return False

    def _ended(self, request: Request) -> None:
        super()._ended(request)
        self._let_in(self._routers[request.router], self._now)

    def _let_in(self, router: _Router, now: float) -> None:
        num_free = router.rule.table.num_free
        while router.turns and num_free > 0:
            self._enter(router.turns.next(), now)
            num_free = min(num_free - 1, router.rule.table.num_free)

    def _look_later(self, router: _Router, now: float) -> None:
        router.is_looking = True
        self._at(now + LOOK_AGAIN_S, lambda then: self._look(router, then))

    def _look(self, router: _Router, now: float) -> None:
        router.is_looking = False
        if router.turns:
            router.rule.table.settle(now)
            self._let_in(router, now)
            self._hint(router, list(router.turns.ahead(router.hints.num_ahead)), now)
            self._look_later(router, now)

    def _hint(self, router: _Router, requests: list[Request], now: float) -> None:
        if not self._with_hints:
            return
        waiting = [Waiting(_asked(request), {"name": request.adapter}) for request in requests]
        for hint in router.hints.due(waiting, now):
            self.num_hints += 1
            self._replicas[hint.replica_id].prefetch(hint.ref["name"], now)


def _asked(request: Request) -> RouteRequest:
    return RouteRequest(request.adapter, request.num_prompt)
