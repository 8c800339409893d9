"""Which tokens the next step computes. Pure: no torch, no clock, no I/O; a decision goes out as a StepPlan.

Continuous batching with chunked prefill under a token budget. Running requests come first, oldest first: each
decodes one token, what the budget leaves goes to prefill chunks, then to new requests in the order of
`engine.waiting`: the adapter that was served least comes first.

A waiting request that lacks pages or an adapter slot does not block those behind it, but it can be overtaken
only so often: past `max_overtakes` admissions (counted at the end of a step) or `max_overtaken_s` it starves:
- if it lacks a slot, the adapter with the fewest running requests admits none of those behind it, so that the
  slot frees; one adapter at a time, so that the others go on at full speed;
- if it lacks pages, nobody behind it is admitted until it is.

Steps may be scheduled ahead of the results of the step before, since the device runs them in order: what the
plans so far compute counts as computed, what they sample is pending. A request that ends by a stop token is
then found to have ended one step late; what that step computed for it is dropped.

When a running request cannot grow, the youngest one gives up its pages and waits again (preemption by
recompute); its sampled tokens are kept. That is work lost, so a request is admitted only if some pages are
left for the growth of those that run.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Container, Set
from dataclasses import dataclass

from engine.admission import Admission, Lack
from engine.copy_clock import CopyClock
from engine.errors import Conflict, RequestTooLarge
from engine.memory import EvictionCause, Needed, PoolMemory
from engine.plan import PENDING, ScheduledChunk, StepPlan
from engine.prefetch import Prefetcher
from engine.request import FinishReason
from engine.residency import AdapterResidency
from engine.sequence import Sequence
from engine.waiting import WaitingQueue

MAX_LACKING = 8
"""So many requests that lack pages, or a slot, are tried a step: those behind would hardly get it, and trying
costs time."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_cache: bool = True
    spare_pages: int = 2  # to be left for each running request when one is admitted
    fair: bool = True  # new requests by what their adapter was given so far; False: by arrival
    max_overtakes: int = 32
    max_overtaken_s: float = 2.0
    # seconds that a page of an adapter takes from host memory to the device, beside a step; 0: within it
    page_copy_s: float = 0.0
    prefetch: bool = True  # adapters to free pages, before anybody asks for them


class Scheduler:
    def __init__(self, config: SchedulerConfig, memory: PoolMemory) -> None:
        assert config.max_num_batched_tokens >= config.max_num_seqs, "each running request decodes a token"
        self.config = config
        self.memory = memory
        self.waiting = WaitingQueue(config.fair)
        self.running: list[Sequence] = []  # by arrival
        self.sequences: dict[str, Sequence] = {}  # all that are here, by request
        self.num_blocked: Counter[str] = Counter()  # waits for what is in use, by what was lacking
        self._copies = CopyClock(config.page_copy_s)
        self.prefetcher = Prefetcher(memory, config.prefetch)
        self._retired: set[str] = set()  # digests to drop when their last request ends

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    def capacity_tokens(self, digest: str | None = None, num_adapter_pages: int = 0) -> int:
        """Tokens one request can ever hold: the pool net of pinned adapters and of its own one."""
        own = 0 if digest and self.memory.residency.is_pinned(digest) else num_adapter_pages
        num_pages = self.memory.pool.num_pages - self.memory.residency.num_pinned_pages - own
        return min(self.config.max_model_len, max(0, num_pages) * self.memory.page_tokens)

    def add(self, seq: Sequence) -> None:
        """Raises RequestTooLarge for what can never fit."""
        assert seq.request_id not in self.sequences, seq.request_id
        capacity = self.capacity_tokens(seq.digest, seq.num_adapter_pages)
        wanted = len(seq.prompt_token_ids) + seq.max_tokens
        if wanted > capacity:
            raise RequestTooLarge(
                f"{len(seq.prompt_token_ids)} prompt tokens and {seq.max_tokens} output tokens are "
                f"{wanted}, but one request can hold {capacity} tokens here",
                param="max_tokens" if len(seq.prompt_token_ids) < capacity else "prompt",
            )
        self.sequences[seq.request_id] = seq
        self.waiting.add(seq)
        if seq.digest:
            self.prefetcher.asked(seq.digest)

    def finish(self, request_id: str, now: float) -> None:
        """Done, cancelled or failed: everything it holds goes back."""
        seq = self.sequences.pop(request_id)
        if seq.is_running:
            _remove(self.running, seq)
            self._release(seq, now)
        else:
            self.waiting.remove(seq)
        if seq.digest in self._retired:
            self.retire(seq.digest)

    def retire(self, digest: str) -> None:
        """Drop an adapter from the pool, at once or when its last request has ended."""
        if any(s.digest == digest for s in self.sequences.values()):
            self._retired.add(digest)
            return
        self._retired.discard(digest)
        self.memory.residency.unpin(digest)
        if self.memory.residency.get(digest) is not None:
            self.memory.evict_adapter(digest, EvictionCause.UNLOADED)
        self.prefetcher.forget(digest)

    def keep(self, digest: str) -> None:
        """Undo `retire`: the content is wanted again."""
        self._retired.discard(digest)

    def pin(self, digest: str, num_pages: int) -> None:
        """Keep an adapter in the pool, from the next step on that has room for it.

        Raises Conflict if too little of the pool would be left for the others, or for a request that is here.
        """
        residency = self.memory.residency
        if residency.is_pinned(digest):
            return
        if residency.num_pinned + 2 > residency.num_slots:
            raise Conflict("no adapter slot would be left for the others", param="max_adapters")
        residency.pin(digest, num_pages)
        wanted = max((self._wanted_pages(seq) for seq in self.sequences.values()), default=1)
        left = self.memory.pool.num_pages - residency.num_pinned_pages
        if left < wanted:
            residency.unpin(digest)
            raise Conflict(
                f"pinned adapters would leave {left} pages of the pool, but {wanted} are needed",
                param="pool_bytes",
            )

    def _wanted_pages(self, seq: Sequence) -> int:
        own = 0 if seq.digest and self.memory.residency.is_pinned(seq.digest) else seq.num_adapter_pages
        return own + self.memory.pages_for(len(seq.prompt_token_ids) + seq.max_tokens)

    def schedule(
        self, now: float, loadable: Container[str] | None = None, starts_at: float | None = None
    ) -> StepPlan:
        """`loadable`: adapters whose image is in host memory; None: all are. Others' requests wait for it.

        `starts_at`: when the device will come to this step, None: now.
        """
        chunks, preempted = self._schedule_running(now)
        # where nobody else runs, the first one may as well wait inside the step
        starts_at = now if starts_at is None else starts_at
        admission = Admission(
            self.memory,
            self._copies,
            self.waiting.namespaces,
            loadable,
            now,
            starts_at if self.running else math.inf,
        )
        admitted = [] if preempted else self._admit(admission, chunks, now)
        admission.load_pinned()
        if not preempted:
            self._prefetch(admission, loadable, now, is_idle=not chunks)
        evictions, freed = self.memory.drain_changes(now)
        for eviction in evictions:
            if eviction.cause is EvictionCause.UNLOADED or eviction.digest in self._retired:
                self.prefetcher.forget(eviction.digest)
            else:
                self.prefetcher.evicted(eviction.digest, len(eviction.page_ids))
        for chunk in chunks:
            self._advance(chunk)
        return StepPlan(
            evictions=evictions,
            freed_pages=freed,
            loads=tuple(admission.loads),
            chunks=tuple(chunks),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            missing=tuple(sorted(admission.missing)),
        )

    def can_prefetch(self, now: float, loadable: Container[str]) -> bool:
        """Whether an adapter could be copied ahead of requests, where none is there."""
        return self.prefetcher.choose(loadable, self.waiting.namespaces, 0, now) is not None

    def on_token(self, seq: Sequence, token_id: int) -> FinishReason | None:
        """The oldest pending token of a request that is here; the reason if it is the last one."""
        assert seq.num_pending > 0
        seq.num_pending -= 1
        reason = seq.append(token_id)
        self.waiting.charge_output(seq)
        # most tokens fill no page: asked here, since there is one for each row of each step
        if seq.is_running and len(seq.token_ids) >= (len(seq.nodes) + 1) * self.memory.page_tokens:
            self._share_full_pages(seq)
        return reason

    def check_invariants(self) -> None:
        self.memory.check_invariants()
        self.prefetcher.check_invariants()
        assert len(self.waiting) + len(self.running) == len(self.sequences)
        assert len(self.running) <= self.config.max_num_seqs
        self.waiting.check_invariants()
        arrivals = [s.arrival for s in self.running]
        assert arrivals == sorted(set(arrivals))
        for seq in self.waiting:
            assert not seq.page_ids
            assert not seq.nodes
            assert seq.num_computed == 0
        leases = Counter(s.digest for s in self.running if s.digest)
        for adapter in self.memory.residency:
            assert adapter.num_leases == leases.pop(adapter.digest, 0)
        assert not leases, "a running request's adapter is not resident"
        users = Counter(id(n) for s in self.running for n in s.nodes)
        for seq in self.running:
            assert self.memory.pool.pages_of(seq.owner) == frozenset(seq.own_page_ids)
            assert [n.page_id for n in seq.nodes] == seq.page_ids[: len(seq.nodes)].tolist()
            assert all(n.num_users == users[id(n)] for n in seq.nodes)
            assert len(seq.page_ids) * self.memory.page_tokens >= seq.num_computed

    def _schedule_running(self, now: float) -> tuple[list[ScheduledChunk], list[str]]:
        chunks: list[ScheduledChunk] = []
        preempted: list[str] = []
        budget = self.config.max_num_batched_tokens
        wanted = [(seq, num) for seq in self.running if (num := seq.num_uncomputed)]
        decoding = sum(num == 1 for _, num in wanted)
        for seq, num_uncomputed in wanted:
            if not seq.is_running:
                continue  # preempted for an older one
            if num_uncomputed == 1:
                decoding -= 1
                num_tokens = 1
            else:
                # decodes behind it keep their place in the budget
                num_tokens = min(num_uncomputed, budget - decoding)
            if num_tokens <= 0:
                continue
            while not self._grow(seq, seq.num_computed + num_tokens):
                victim = self.running[-1]
                decoding -= victim.num_uncomputed == 1
                self._preempt(victim, now)
                preempted.append(victim.request_id)
                if victim is seq:
                    break
            else:
                chunks.append(self._chunk(seq, num_tokens))
                budget -= num_tokens
        return chunks, preempted

    def _admit(self, admission: Admission, chunks: list[ScheduledChunk], now: float) -> list[str]:
        admitted: list[str] = []
        blocked: list[tuple[Sequence, int]] = []  # and how many were admitted before it
        set_aside = _SetAside(self.memory.residency)
        num_lacking: Counter[Lack] = Counter()
        budget = self.config.max_num_batched_tokens - sum(len(c.token_ids) for c in chunks)
        for seq in self.waiting.candidates(set_aside):
            if budget <= 0 or len(self.running) == self.config.max_num_seqs:
                break
            lack = admission.start(seq, self.config.spare_pages * len(self.running))
            if lack is None:
                self._run(seq)
                chunks.append(self._chunk(seq, min(seq.num_uncomputed, budget)))
                budget -= len(chunks[-1].token_ids)
                admitted.append(seq.request_id)
                continue
            num_lacking[lack] += 1
            if lack is not Lack.PAGES:
                set_aside.add(seq.namespace, lack, num_lacking[lack])
            is_starving = False
            if lack in (Lack.PAGES, Lack.SLOT):
                blocked.append((seq, len(admitted)))
                if seq.blocked_since is None:
                    seq.blocked_since = now
                    self.num_blocked[lack.value] += 1
                is_starving = self._is_starving(seq, now)
            if lack is Lack.PAGES and (is_starving or num_lacking[lack] == MAX_LACKING):
                break
            if lack is Lack.SLOT and is_starving and not set_aside.drained:
                set_aside.drained = self._adapter_to_drain(admission.protected)
            if set_aside.is_everything(self.waiting.namespaces):
                break
        for seq, num_before in blocked:
            seq.num_overtaken += len(admitted) - num_before
        return admitted

    def _run(self, seq: Sequence) -> None:
        self.waiting.start(seq)
        _insert(self.running, seq)

    def _prefetch(
        self, admission: Admission, loadable: Container[str] | None, now: float, is_idle: bool
    ) -> None:
        """One adapter, and never behind another copy, so that a request waits for one at most."""
        if admission.protected or not self._copies.is_idle(now):
            return  # somebody waits for pages or for a copy
        if not is_idle and self.config.page_copy_s == 0.0:
            return
        num_spare_pages = self.config.spare_pages * len(self.running)
        prefetch = self.prefetcher.choose(loadable, self.waiting.namespaces, num_spare_pages, now)
        if prefetch is not None:
            admission.load_ahead(prefetch)
            self.prefetcher.copied(prefetch)

    def _is_starving(self, seq: Sequence, now: float) -> bool:
        """It is blocked now, and was for too long."""
        assert seq.blocked_since is not None
        return (
            seq.num_overtaken >= self.config.max_overtakes
            or now - seq.blocked_since >= self.config.max_overtaken_s
        )

    def _adapter_to_drain(self, protected: Set[str]) -> str | None:
        """None: the slots that could be freed wait for older requests."""
        candidates = [a for a in self.memory.residency if not a.pinned and a.digest not in protected]
        adapter = min(candidates, key=lambda a: (a.num_leases, a.digest), default=None)
        return adapter.digest if adapter else None

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        num_pages = self.memory.pages_for(num_tokens) - len(seq.page_ids)
        if num_pages <= 0:
            return True
        needed = Needed(any=self.waiting.namespaces)
        if not self.memory.can_take(num_pages, needed):
            return False
        seq.page_ids.extend(self.memory.take(seq.owner, num_pages, needed))
        return True

    def _preempt(self, seq: Sequence, now: float) -> None:
        _remove(self.running, seq)
        self._release(seq, now)
        self.waiting.add(seq)

    def _release(self, seq: Sequence, now: float) -> None:
        self.waiting.stop(seq)
        self.memory.give_back(seq.owner, seq.own_page_ids)
        self.memory.prefix.release(seq.nodes, now)
        if seq.digest:
            self.memory.residency.release(seq.digest, now)
        seq.stop()

    def _advance(self, chunk: ScheduledChunk) -> None:
        """Whatever is scheduled later runs later, and finds the chunk's KV in the pool. Not in the same step:
        its attention may read what is older before the step's own keys and values are written.
        """
        seq = self.sequences[chunk.request_id]
        seq.num_computed = chunk.start + len(chunk.token_ids)
        seq.num_pending += chunk.samples
        if chunk.start < len(seq.token_ids):  # else its token is not known yet
            self._share_full_pages(seq)

    def _share_full_pages(self, seq: Sequence) -> None:
        if not self.config.prefix_cache:
            return
        page_tokens = self.memory.page_tokens
        num_known = min(seq.num_computed, len(seq.token_ids))
        while (len(seq.nodes) + 1) * page_tokens <= num_known:
            i = len(seq.nodes)
            tokens = tuple(seq.token_ids[i * page_tokens : (i + 1) * page_tokens])
            parent = seq.nodes[-1] if seq.nodes else None
            node = self.memory.share(seq.owner, seq.namespace, parent, tokens, seq.page_ids[i])
            seq.page_ids[i] = node.page_id
            seq.nodes.append(node)

    def _chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        start, token_ids = seq.num_computed, seq.token_ids
        end, num_known = start + num_tokens, len(token_ids)
        adapter = self.memory.residency.get(seq.digest) if seq.digest else None
        known = tuple(token_ids[start:end])
        return ScheduledChunk(
            seq.request_id,
            start,
            known if end <= num_known else known + (PENDING,) * (end - num_known),
            seq.page_ids[: self.memory.pages_for(end)],
            adapter.slot if adapter else -1,
            samples=end == num_known + seq.num_pending,
        )


class _SetAside(Container[str]):
    """Namespaces of which no request is tried any more in this step: they lack the same, or are drained."""

    def __init__(self, residency: AdapterResidency) -> None:
        self.drained: str | None = None  # makes room for others; its own requests wait
        self._namespaces: set[str] = set()
        self._residency = residency
        self._all_cold = False

    def add(self, namespace: str, lack: Lack, count: int) -> None:
        """`count`: namespaces that lack it."""
        self._namespaces.add(namespace)
        is_cold = self._residency.get(namespace) is None
        # no other copy starts in this step, or no slot will be found
        if (lack is Lack.COPY and is_cold) or (lack is Lack.SLOT and count >= MAX_LACKING):
            self._all_cold = True

    def is_everything(self, waiting: Container[str]) -> bool:
        """Whether nobody of `waiting` is left to try; told only when that is cheap to find out."""
        if not self._all_cold or ("" in waiting and "" not in self):
            return False
        return not any(a.digest in waiting and a.digest not in self for a in self._residency)

    def __contains__(self, namespace: object) -> bool:
        if namespace in self._namespaces or namespace == self.drained:
            return True
        return self._all_cold and bool(namespace) and self._residency.get(str(namespace)) is None


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _insert(queue: list[Sequence], seq: Sequence) -> None:
    bisect.insort(queue, seq, key=_arrival)


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    index = bisect.bisect_left(queue, seq.arrival, key=_arrival)
    assert queue[index] is seq
    del queue[index]
