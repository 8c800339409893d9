"""The step loop's body: requests in, tokens out. No torch, no sockets, no clock of its own.

One thread owns an EngineCore and calls it; see `engine.loop`. Every request that was accepted ends in exactly
one event with a finish_reason or an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adapter_control import AdapterControl
from engine.adapters.manager import AdapterManager
from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.errors import InvalidRequest, LorafleetError, Overloaded, RequestTooLarge
from engine.events import Event, TokenEvent
from engine.eviction import EvictionOrder, ReloadCosts
from engine.live_request import LiveRequest
from engine.memory import Eviction, PoolMemory
from engine.plan import StepPlan
from engine.request import AdapterRef, GenerateRequest, TokenLogprob
from engine.runner.base import Runner
from engine.sampling_params import check_token_ids, check_vocabulary
from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.stats import EngineStats
from engine.step_clock import StepClock
from engine.step_cost import StepCost, StepWork

if TYPE_CHECKING:
    from engine.adapters.loader import LoadResult


@dataclass(frozen=True, slots=True)
class Geometry:
    """Facts of the model and the pool that the core needs as plain numbers."""

    num_pages: int
    page_tokens: int
    page_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_digest: str = ""  # of the base model


def build_memory(config: EngineConfig, geometry: Geometry) -> PoolMemory:
    costs = ReloadCosts().of_pool(geometry.page_bytes, geometry.page_tokens)
    order = EvictionOrder(config.eviction_policy, costs=costs)
    return PoolMemory(geometry.num_pages, geometry.page_tokens, config.max_adapters, order)


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        geometry: Geometry,
        runner: Runner,
        manager: AdapterManager,
        clock: Callable[[], float],
        memory: PoolMemory | None = None,
    ) -> None:
        """`memory`: of the geometry's size, with the order that `manager` evicts by. None: one of our own."""
        self.config = config
        self.geometry = geometry
        self.stats = EngineStats()
        self.memory = memory or build_memory(config, geometry)
        self.memory.order.in_host = manager
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=geometry.max_model_len,
                prefix_cache=config.prefix_cache,
                fair=config.fairness == "tokens",
                max_overtakes=config.max_overtakes,
                max_overtaken_s=config.max_overtaken_s,
                prefetch=config.prefetch,
                page_copy_s=geometry.page_bytes / runner.copy_bytes_per_s,
            ),
            self.memory,
        )
        self.manager = manager
        self.requests: dict[str, LiveRequest] = {}
        self.is_stalled = False  # the last step could run nothing: only a load or an arrival can change that
        self._runner = runner
        self._clock = clock
        self._adapters = AdapterControl(
            manager, self.scheduler, self.stats, geometry.page_bytes, config.pinned_adapters, clock
        )
        self._num_arrivals = 0
        self._events: list[Event] = []
        self._step_clock = StepClock()
        self._deadlines = Deadlines()
        self._in_flight: deque[dict[str, Sequence]] = deque()  # of each step: what it samples a token for

    @property
    def is_idle(self) -> bool:
        if self.scheduler.has_work or self._in_flight:
            return False
        is_pinning = any(digest in self.manager for digest in self.memory.residency.absent_pinned)
        return not is_pinning and not self.scheduler.can_prefetch(self._clock(), self.manager)

    def add_request(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest, RequestTooLarge or Overloaded; then nothing has changed."""
        self._check(request)
        now = self._clock()
        self._num_arrivals += 1
        record = LiveRequest(request, self._num_arrivals, now)
        digest = self._adapters.find(request.adapter)
        if request.timeout_s is not None:
            namespace = digest or (request.adapter.name if request.adapter else "")
            num_prompt = len(request.prompt_token_ids)
            self._deadlines.check(namespace, num_prompt, request.timeout_s, self.scheduler.waiting)
        if request.adapter is None or digest is not None:
            self._enqueue(record, digest)
        else:
            self._adapters.want(request.adapter, request.request_id)
        self.requests[request.request_id] = record
        if request.timeout_s is not None:
            self._deadlines.add(request.request_id, now + request.timeout_s)
        if request.adapter is not None and digest is not None:
            self._adapters.found(request.adapter, digest)
            self._count_hit(record, request.adapter, digest)

    def on_loaded(self, result: LoadResult) -> None:
        """A load ended: requests that waited for it are queued, or fail; calls are answered."""
        end = self._adapters.on_loaded(result)
        self._events += end.answers
        for request_id in end.ready:
            assert end.digest is not None
            record = self.requests[request_id]
            record.loaded = self._clock()
            record.tier = end.tier
            self.stats.adapter(record.name).on_wait(record.loaded - record.arrived, end.tier == "disk")
            try:
                self._enqueue(record, end.digest)
            except LorafleetError as error:
                self._fail(request_id, error)
        for request_id, reason in end.failed.items():
            self._fail(request_id, reason)
        self._adapters.settle(end)

    def abort(self, request_id: str) -> None:
        """Unknown ids are ignored: the request may just have ended."""
        if request_id in self.requests:
            self._finish(request_id)
            self._events.append(TokenEvent(request_id, finish_reason="abort"))

    def load_adapter(self, call_id: str, ref: AdapterRef) -> None:
        """Read and validate it into host memory; a CallEvent answers."""
        answer = self._adapters.load(call_id, ref)
        if answer is not None:
            self._events.append(answer)

    def prefetch(self, ref: AdapterRef) -> None:
        """A request for it is on its way: have it ready by then, if that harms nobody."""
        self._adapters.prefetch(ref)

    def unload_adapter(self, call_id: str, name: str) -> None:
        """Its requests finish; then its pages and host bytes are free. A CallEvent answers."""
        self._events.append(self._adapters.unload(call_id, name))

    def pin_adapter(self, call_id: str, name: str) -> None:
        """Keep what the name means, now and later, in the pool. A CallEvent answers."""
        self._events.append(self._adapters.pin(call_id, name))

    def unpin_adapter(self, call_id: str, name: str) -> None:
        """A name that is not pinned stays so. A CallEvent answers."""
        self._events.append(self._adapters.unpin(call_id, name))

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def step(self) -> None:
        """Schedule and submit a step, then postprocess the oldest one in flight, if there are enough of them.

        So the device never waits for the host: while it runs one step, the next one is prepared.
        """
        now = self._clock()
        self._give_up_late(now)
        plan = self.scheduler.schedule(now, self.manager, self._step_clock.free_at(now))
        self._apply(plan, now)
        # a plan without chunks may still take weights from a slot
        images = {load.digest: self.manager.image(load.digest) for load in plan.loads}
        self._runner.submit(plan, images)
        sequences = self.scheduler.sequences
        sampling = {c.request_id: sequences[c.request_id] for c in plan.chunks if c.samples}
        self._in_flight.append(sampling)
        self._step_clock.submitted(now, self._work(plan))
        if plan.chunks:
            self.stats.steps += 1
            slots = {chunk.adapter_slot for chunk in plan.chunks}
            self.stats.step_adapters.observe(len(slots - {-1}))
        self._deadlines.served(plan.num_tokens, len(sampling), now, bool(self.scheduler.waiting))
        self.is_stalled = not plan.chunks and len(self._in_flight) == 1
        if plan.loads or plan.evictions:
            self._adapters.settle()
        # without chunks there is nothing to prepare ahead
        while len(self._in_flight) >= (self._runner.max_in_flight if plan.chunks else 1):
            self._collect()
        if self.config.debug:
            self.check_invariants()

    def _collect(self) -> None:
        sampling = self._in_flight.popleft()
        sampled = self._runner.collect()
        seconds = self._step_clock.collected(self._clock(), is_last=not self._in_flight)
        if seconds is not None:
            self.stats.step_seconds.observe(seconds)
        for token in sampled:
            seq = sampling[token.request_id]
            # it may have ended meanwhile, and another one may have its id
            if self.scheduler.sequences.get(token.request_id) is seq:
                self._on_token(seq, token.token_id, token.logprob)

    @property
    def step_cost(self) -> StepCost | None:
        return self._step_clock.costs.cost()

    def close(self) -> None:
        self.manager.close()
        self._runner.close()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        self.manager.check_invariants()
        live = Counter(r.seq.digest for r in self.requests.values() if r.seq and r.seq.digest)
        assert live == +self._adapters.num_live, (live, self._adapters.num_live)

    def _give_up_late(self, now: float) -> None:
        """Requests that have waited for so long that nobody wants their answer."""
        for request_id in self._deadlines.take_passed(now):
            if not self.requests[request_id].is_started:
                late = Overloaded("it has waited too long", param="timeout_s", retry_after_s=1.0)
                self._fail(request_id, late)

    def _work(self, plan: StepPlan) -> StepWork | None:
        if not plan.chunks or plan.loads:
            return None  # a copy of weights may hold the step up
        num_rows = [len(chunk.token_ids) for chunk in plan.chunks].count(1)
        return StepWork(plan.num_tokens - num_rows, num_rows, self.memory.residency.num_leased_pages)

    def _check(self, request: GenerateRequest) -> None:
        if request.request_id in self.requests:
            raise InvalidRequest("a request of this id is running", param="request_id")
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        check_token_ids(prompt, self.geometry.vocab_size, "prompt")
        check_vocabulary(request.params, self.geometry.vocab_size)
        if len(self.requests) - len(self.scheduler.running) >= self.config.max_queued_requests:
            raise Overloaded(f"{self.config.max_queued_requests} requests are queued", retry_after_s=1.0)

    def _enqueue(self, record: LiveRequest, digest: str | None) -> None:
        """Give it to the scheduler. Raises RequestTooLarge."""
        request, params = record.request, record.request.params
        num_adapter_pages = self._adapters.num_pages(digest) if digest else 0
        num_prompt = len(request.prompt_token_ids)
        capacity = self.scheduler.capacity_tokens(digest, num_adapter_pages)
        if num_prompt >= capacity:
            raise RequestTooLarge(
                f"the prompt has {num_prompt} tokens, but one request can hold {capacity} tokens here",
                param="prompt",
            )
        stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.geometry.eos_token_ids))
        seq = Sequence(
            request_id=request.request_id,
            arrival=record.arrival,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=params.max_tokens or capacity - num_prompt,
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset(stop),
            digest=digest,
            num_adapter_pages=num_adapter_pages,
        )
        self.scheduler.add(seq)
        self._deadlines.queued(seq)
        record.seq = seq
        assert params.seed is not None, "the caller draws one, so that choices and retries differ"
        self._runner.start(request.request_id, params, params.seed, request.prompt_token_ids)
        if digest:
            self._adapters.use(digest)

    def _count_hit(self, record: LiveRequest, ref: AdapterRef, digest: str) -> None:
        stats = self.stats.adapter(ref.name)
        if self.memory.residency.get(digest):
            record.tier = "hbm"
            stats.hbm_hits += 1
        else:
            record.tier = "host"
            stats.host_hits += 1

    def _apply(self, plan: StepPlan, now: float) -> None:
        if plan.evictions:
            self._count_evictions(plan.evictions)
        for load in plan.loads:
            self.stats.touched |= self.manager.names_of(load.digest)
        for digest in plan.missing:
            self.manager.want_again(digest)
        self.stats.preemptions += len(plan.preempted)
        for request_id in plan.admitted:
            seq = self.scheduler.sequences[request_id]
            record = self.requests[request_id]
            stats = self.stats.adapter(record.name)
            if record.started is None:
                record.started = now
            if seq.num_outputs == 0:
                stats.prompt_tokens += len(seq.prompt_token_ids)
                stats.cached_tokens += seq.num_cached or 0

    def _count_evictions(self, evictions: tuple[Eviction, ...]) -> None:
        for eviction in evictions:
            self.stats.hbm_evictions[eviction.cause.value] += 1
            names = self.manager.names_of(eviction.digest)
            self.stats.touched |= names
            if names:
                self.stats.adapter(min(names)).evictions[eviction.cause.value] += 1

    def _on_token(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        request_id = seq.request_id
        record = self.requests[request_id]
        reason = self.scheduler.on_token(seq, token_id)
        self.stats.adapter(record.name).output_tokens += 1
        if reason:
            self._deadlines.ended(seq.num_outputs)
            self._finish(request_id)
        is_stop_asked = reason == "stop" and token_id in record.request.params.stop_token_ids
        is_told = record.request.is_traced and seq.num_outputs == 1
        self._events.append(
            TokenEvent(
                request_id,
                token_id,
                logprob,
                finish_reason=reason,
                stop_token_id=token_id if is_stop_asked else None,
                num_cached_tokens=seq.num_cached or 0,
                milestones=record.milestones(self._clock()) if is_told else None,
            )
        )

    def _finish(self, request_id: str) -> None:
        record = self.requests.pop(request_id)
        self._deadlines.forget(request_id)
        if record.seq is None:
            self.manager.leave(request_id)
        else:
            self.scheduler.finish(request_id, self._clock())
            self._runner.finish(request_id)
            if record.seq.digest:
                self._adapters.release(record.seq.digest)
        if record.name and self.manager.digest_of(record.name) is None:  # it was unloaded
            self.stats.adapters.pop(record.name, None)

    def _fail(self, request_id: str, error: LorafleetError) -> None:
        self._finish(request_id)
        self._events.append(TokenEvent(request_id, error=error))
