"""One replica in simulated time: seats, adapter slots, host memory, a source, and steps of a measured cost.

Decoding is fluid: all that decode advance at one rate, 1 / step, which changes with who is there; so only
changes are events, not tokens. Prompts are computed one after another and slow the decoding beside them.
A request whose adapter is not there blocks nobody; an adapter in use is never evicted.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import DEFAULT_PARALLEL_LOADS
from engine.step_cost import StepCost
from router.fleet_table import Report

UNUSED_AFTER_S = 10.0  # as `deployments.replica_books` counts a slot as free
CHUNK_TOKENS = 256  # of a prompt, in a step with decodes


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    seats: int
    slots: int  # adapters in HBM
    host_slots: int  # adapters in host memory
    cost: StepCost
    adapter_pages: int = 40
    load_s: float = 0.3  # from the source
    max_parallel_loads: int = DEFAULT_PARALLEL_LOADS

    @property
    def capacity(self) -> int:
        """Requests that it accepts, as `deployments.app` sets it."""
        return 2 * self.seats


@dataclass(slots=True, eq=False)
class Request:
    adapter: str
    num_prompt: int
    num_output: int
    arrived: float
    router: int = 0
    replica: SimReplica | None = None
    first_token: float = -1.0
    ended: float = -1.0
    is_cold: bool = False  # it waited for the source
    num_retries: int = 0  # of routing
    was_retried: bool = False  # on another replica
    reason: str = ""


At = Callable[[float, Callable[[float], None]], None]  # (time, what to do then, given the time)


@dataclass(slots=True, eq=False)
class SimReplica:
    replica_id: str
    spec: ReplicaSpec
    at: At
    on_end: Callable[[Request], None]
    is_dirty: bool = True  # something changed since its last report
    is_dead: bool = False
    num_loads: int = 0
    busy_tokens: int = 0  # output it was asked for
    requests: dict[Request, None] = field(default_factory=dict)  # in flight
    _waiting: deque[Request] = field(default_factory=deque)
    _users: OrderedDict[str, int] = field(
        default_factory=OrderedDict
    )  # in HBM -> running; least recent first
    _used_at: dict[str, float] = field(default_factory=dict)
    _host: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recently used first
    _loading: dict[str, None] = field(default_factory=dict)  # the first few are under way
    _num_running: int = 0  # seats taken
    _num_adapters_running: int = 0
    _decoding: list[tuple[float, int, Request]] = field(default_factory=list)  # (progress at its end, ...)
    _progress: float = 0.0  # tokens that each decoding request has advanced since the start
    _progress_at: float = 0.0
    _step_s: float = 1.0
    _prefilled_at: float = 0.0
    _version: int = 0  # of the next end that is expected
    _count: int = 0

    def accepts(self) -> bool:
        return not self.is_dead and len(self.requests) < self.spec.capacity

    def add(self, request: Request, now: float) -> None:
        self.is_dirty = True
        self.requests[request] = None
        self.busy_tokens += request.num_output
        name = request.adapter
        if name not in self._users and name not in self._host:
            request.is_cold = True
            self._want(name, now)
        self._waiting.append(request)
        self._admit(now)

    def prefetch(self, adapter: str, now: float) -> None:
        """A request for it is on its way."""
        if not self.is_dead and adapter not in self._users and adapter not in self._host:
            self.is_dirty = True
            self._want(adapter, now)

    def die(self) -> list[Request]:
        """What was in flight."""
        self.is_dead = True
        lost, self.requests = list(self.requests), {}
        return lost

    def report(self, now: float) -> Report:
        self.is_dirty = False
        unused = sum(not n and now - self._used_at[name] > UNUSED_AFTER_S for name, n in self._users.items())
        free = self.spec.slots - len(self._users) - len(self._loading)
        idle = sum(not n for n in self._users.values())
        return Report(
            resident=frozenset(self._users),
            loading=frozenset(self._loading),
            host=frozenset(self._host),
            num_requests=len(self.requests),
            free_slots=free + unused,
            idle_slots=free + idle,
            queued_tokens=sum(r.num_prompt for r in self._waiting),
            lora_pages=self._num_adapters_running * self.spec.adapter_pages,
            adapter_pages=self.spec.adapter_pages,
            cost=self.spec.cost,
        )

    def _want(self, name: str, now: float) -> None:
        if name not in self._loading:
            self._loading[name] = None
            if len(self._loading) <= self.spec.max_parallel_loads:
                self._load(name, now)

    def _load(self, name: str, now: float) -> None:
        self.num_loads += 1
        self.at(now + self.spec.load_s, lambda then: self._loaded(name, then))

    def _loaded(self, name: str, now: float) -> None:
        if self.is_dead:
            return
        self.is_dirty = True
        del self._loading[name]
        queued = list(self._loading)[self.spec.max_parallel_loads - 1 : self.spec.max_parallel_loads]
        for following in queued:
            self._load(following, now)
        self._host[name] = None
        while len(self._host) > self.spec.host_slots:
            needed = {r.adapter for r in self._waiting}
            self._host.pop(next((n for n in self._host if n not in needed), name))
        self._admit(now)

    def _admit(self, now: float) -> None:
        """Whoever can start does; nobody waits for another one's adapter."""
        left: deque[Request] = deque()
        while self._waiting and self._num_running < self.spec.seats:
            request = self._waiting.popleft()
            if self._take_slot(request.adapter):
                self._start(request, now)
            else:
                left.append(request)
        left.extend(self._waiting)
        self._waiting = left

    def _take_slot(self, name: str) -> bool:
        if name in self._users:
            return True
        if name not in self._host:
            if name not in self._loading:  # it left host memory meanwhile
                self._loading[name] = None
                if len(self._loading) <= self.spec.max_parallel_loads:
                    self.at(0.0, lambda now: self._load(name, now))
            return False
        if len(self._users) >= self.spec.slots:
            victim = next((n for n, users in self._users.items() if not users), None)
            if victim is None:
                return False
            del self._users[victim]
        self._users[name] = 0
        self._host.move_to_end(name)
        return True

    def _start(self, request: Request, now: float) -> None:
        self._num_running += 1
        self._num_adapters_running += not self._users[request.adapter]
        self._users[request.adapter] += 1
        self._users.move_to_end(request.adapter)
        self._used_at[request.adapter] = now
        self._advance(now)
        begin = max(now, self._prefilled_at)
        self._prefilled_at = begin + request.num_prompt * self.spec.cost.prefill_s + self.spec.cost.base_s
        self.at(self._prefilled_at, lambda then: self._first_token(request, then))
        self._expect_end(now)

    def _first_token(self, request: Request, now: float) -> None:
        if self.is_dead:
            return
        request.first_token = now
        self._advance(now)
        self._count += 1
        heapq.heappush(self._decoding, (self._progress + request.num_output - 1, self._count, request))
        self._expect_end(now)

    def _advance(self, now: float) -> None:
        """Bring the progress up to date; call before anything changes the rate."""
        self._progress += (now - self._progress_at) / self._step_s
        self._progress_at = now

    def _expect_end(self, now: float) -> None:
        cost = self.spec.cost
        pages = self._num_adapters_running * self.spec.adapter_pages
        self._step_s = cost.base_s + cost.row_s * len(self._decoding) + cost.lora_page_s * pages
        if self._prefilled_at > now:
            self._step_s += cost.prefill_s * CHUNK_TOKENS
        self._version += 1
        if self._decoding:
            version = self._version
            end = now + max(0.0, self._decoding[0][0] - self._progress) * self._step_s
            self.at(end, lambda then: self._end(version, then))

    def _end(self, version: int, now: float) -> None:
        if self.is_dead or version != self._version:
            return
        self.is_dirty = True
        self._advance(now)
        while self._decoding and self._decoding[0][0] <= self._progress + 1e-6:
            _, _, request = heapq.heappop(self._decoding)
            self._num_running -= 1
            self._users[request.adapter] -= 1
            self._num_adapters_running -= not self._users[request.adapter]
            self._used_at[request.adapter] = now
            del self.requests[request]
            request.ended = now
            self.on_end(request)
        self._admit(now)
        self._expect_end(now)
