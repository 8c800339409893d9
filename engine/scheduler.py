"""Which tokens the next step computes. Pure: no torch, no clock, no I/O; a decision goes out as a StepPlan.

Continuous batching with chunked prefill under a token budget. Running requests come first, oldest first: each
decodes one token, what the budget leaves goes to prefill chunks, then to new requests in order of arrival.

A waiting request that lacks pages or an adapter slot does not block those behind it, but it can be overtaken
only so often: past `max_overtakes` admissions or `max_overtaken_s` it is starving, and then
- if it lacks a slot, the adapter with the fewest running requests admits no more, so that its slot frees;
- if it lacks pages, nobody behind it is admitted until it is.

When a running request cannot grow, the youngest one gives up its pages and waits again (preemption by
recompute); its sampled tokens are kept.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from engine.errors import RequestTooLarge
from engine.memory import EvictionCause, Needed, PoolMemory
from engine.plan import ScheduledChunk, StepPlan
from engine.prefix_cache import PrefixNode
from engine.residency import ResidentAdapter
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_cache: bool = True
    max_overtakes: int = 32
    max_overtaken_s: float = 2.0


class Scheduler:
    def __init__(self, config: SchedulerConfig, memory: PoolMemory) -> None:
        self.config = config
        self.memory = memory
        self.waiting: list[Sequence] = []  # by arrival
        self.running: list[Sequence] = []  # by arrival
        self._sequences: dict[str, Sequence] = {}
        self._retired: set[str] = set()  # digests to drop when their last request ends

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __getitem__(self, request_id: str) -> Sequence:
        return self._sequences[request_id]

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def capacity_tokens(self, digest: str | None = None, num_adapter_pages: int = 0) -> int:
        """Tokens one request can ever hold: the pool net of pinned adapters and of its own one."""
        resident = self.memory.residency.get(digest) if digest else None
        own = 0 if resident is not None and resident.pinned else num_adapter_pages
        num_pages = self.memory.pool.num_pages - self.memory.residency.num_pinned_pages - own
        return min(self.config.max_model_len, max(0, num_pages) * self.memory.page_tokens)

    def add(self, seq: Sequence) -> None:
        """Raises RequestTooLarge for what can never fit."""
        assert seq.request_id not in self._sequences, seq.request_id
        capacity = self.capacity_tokens(seq.digest, seq.num_adapter_pages)
        wanted = len(seq.prompt_token_ids) + seq.max_tokens
        if wanted > capacity:
            raise RequestTooLarge(
                f"{len(seq.prompt_token_ids)} prompt tokens and {seq.max_tokens} output tokens are "
                f"{wanted}, but one request can hold {capacity} tokens here",
                param="max_tokens" if len(seq.prompt_token_ids) < capacity else "prompt",
            )
        self._sequences[seq.request_id] = seq
        bisect.insort(self.waiting, seq, key=lambda s: s.arrival)

    def finish(self, request_id: str, now: float) -> None:
        """Done, cancelled or failed: everything it holds goes back."""
        seq = self._sequences.pop(request_id)
        if seq in self.running:
            self.running.remove(seq)
            self._release(seq, now)
        else:
            self.waiting.remove(seq)
        if seq.digest in self._retired:
            self.retire(seq.digest)

    def retire(self, digest: str) -> None:
        """Drop an adapter from the pool, at once or when its last request has ended."""
        if any(s.digest == digest for s in self._sequences.values()):
            self._retired.add(digest)
            return
        self._retired.discard(digest)
        adapter = self.memory.residency.get(digest)
        if adapter is not None:
            adapter.pinned = False
            self.memory.evict_adapter(digest, EvictionCause.UNLOADED)

    def keep(self, digest: str) -> None:
        """Undo `retire`: the content is wanted again."""
        self._retired.discard(digest)

    def schedule(self, now: float, loadable: Container[str] | None = None) -> StepPlan:
        """`loadable`: adapters whose image is in host memory; None: all are. Others' requests wait for it."""
        budget = self.config.max_num_batched_tokens
        chunks: dict[str, ScheduledChunk] = {}
        preempted = self._schedule_running(chunks, budget, now)
        budget -= sum(len(c.token_ids) for c in chunks.values())
        loads: list[ResidentAdapter] = []
        admitted: list[str] = []
        missing: set[str] = set()
        if not preempted:
            admitted = self._admit(chunks, loads, missing, budget, now, loadable)
        evictions, freed = self.memory.drain_changes()
        return StepPlan(
            evictions=evictions,
            freed_pages=freed,
            loads=tuple((a.digest, a.slot, a.page_ids) for a in loads),
            chunks=tuple(chunks.values()),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            missing=tuple(sorted(missing)),
        )

    def commit(self, plan: StepPlan) -> None:
        """The KV of the plan's tokens is in the pool: full pages become shareable."""
        for chunk in plan.chunks:
            seq = self._sequences.get(chunk.request_id)
            if seq is None:
                continue  # ended while the step ran
            seq.num_computed = chunk.start + len(chunk.token_ids)
            if self.config.prefix_cache:
                self._share_full_pages(seq)

    def check_invariants(self) -> None:
        self.memory.check_invariants()
        assert len(self.waiting) + len(self.running) == len(self._sequences)
        assert len(self.running) <= self.config.max_num_seqs
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=lambda s: s.arrival)
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
            assert [n.page_id for n in seq.nodes] == seq.page_ids[: len(seq.nodes)]
            assert all(n.num_users == users[id(n)] for n in seq.nodes)
            assert len(seq.page_ids) * self.memory.page_tokens >= seq.num_computed

    def _schedule_running(self, chunks: dict[str, ScheduledChunk], budget: int, now: float) -> list[str]:
        preempted: list[str] = []
        decoding = sum(s.num_uncomputed == 1 for s in self.running)
        for seq in list(self.running):
            if seq.request_id in preempted:
                continue
            if seq.num_uncomputed == 1:
                decoding -= 1
                num_tokens = 1
            else:
                # decodes behind it keep their place in the budget
                num_tokens = min(seq.num_uncomputed, budget - decoding)
            if num_tokens <= 0:
                continue
            while not self._grow(seq, seq.num_computed + num_tokens):
                victim = self.running[-1]
                decoding -= victim is not seq and victim.num_uncomputed == 1
                self._preempt(victim, now)
                preempted.append(victim.request_id)
                if victim is seq:
                    break
            else:
                chunks[seq.request_id] = self._chunk(seq, num_tokens)
                budget -= num_tokens
        return preempted

    def _admit(
        self,
        chunks: dict[str, ScheduledChunk],
        loads: list[ResidentAdapter],
        missing: set[str],
        budget: int,
        now: float,
        loadable: Container[str] | None,
    ) -> list[str]:
        admitted: list[str] = []
        blocked: list[Sequence] = []
        draining: set[str] = set()
        older: set[str] = set()
        waiting = Counter(s.digest for s in self.waiting if s.digest)
        for seq in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.config.max_num_seqs:
                break
            if seq.digest in draining:
                continue
            if self._lacks_image(seq, loadable):
                assert seq.digest is not None
                missing.add(seq.digest)
                continue
            needed = Needed(older, waiting)
            if self._start(seq, needed, loads, now):
                num_tokens = min(seq.num_uncomputed, budget)
                chunks[seq.request_id] = self._chunk(seq, num_tokens)
                budget -= num_tokens
                admitted.append(seq.request_id)
                for other in blocked:
                    other.num_overtaken += 1
                continue
            blocked.append(seq)
            if seq.digest:
                older.add(seq.digest)
            if seq.blocked_since is None:
                seq.blocked_since = now
            if self._is_starving(seq, now):
                if not self._lacks_slot(seq):
                    break
                draining.add(self._adapter_to_drain())
        return admitted

    def _lacks_image(self, seq: Sequence, loadable: Container[str] | None) -> bool:
        return (
            seq.digest is not None
            and loadable is not None
            and seq.digest not in loadable
            and self.memory.residency.get(seq.digest) is None
        )

    def _is_starving(self, seq: Sequence, now: float) -> bool:
        assert seq.blocked_since is not None
        return (
            seq.num_overtaken >= self.config.max_overtakes
            or now - seq.blocked_since >= self.config.max_overtaken_s
        )

    def _lacks_slot(self, seq: Sequence) -> bool:
        residency = self.memory.residency
        return (
            seq.digest is not None
            and residency.get(seq.digest) is None
            and not residency.has_free_slot
            and any(not a.pinned for a in residency)
        )

    def _adapter_to_drain(self) -> str:
        candidates = [a for a in self.memory.residency if not a.pinned]
        return min(candidates, key=lambda a: (a.num_leases, a.digest)).digest

    def _start(self, seq: Sequence, needed: Needed, loads: list[ResidentAdapter], now: float) -> bool:
        """Move a waiting request to running with all that its prompt needs, or change nothing."""
        memory = self.memory
        usable = seq.token_ids[: len(seq.token_ids) - 1]  # one token at least is computed, to have logits
        nodes = memory.prefix.match(seq.namespace, usable) if self.config.prefix_cache else []
        # one token beyond the prompt, so that a full pool does not preempt the newcomer in its next step
        num_tokens = min(len(seq.token_ids) + 1, seq.max_kv_tokens)
        num_pages = memory.pages_for(num_tokens) - len(nodes)
        num_unused_nodes = sum(n.num_users == 0 for n in nodes)
        adapter = memory.residency.get(seq.digest) if seq.digest else None
        is_cold = seq.digest is not None and adapter is None
        num_adapter_pages = seq.num_adapter_pages if is_cold else 0
        # what the request itself is going to use is not there to be evicted
        keeping = Needed(needed.older | {seq.digest or ""}, needed.any)
        if memory.num_available(keeping) - num_unused_nodes < num_pages + num_adapter_pages:
            return False
        memory.prefix.acquire(nodes)
        if is_cold:
            assert seq.digest is not None
            adapter = memory.load_adapter(seq.digest, num_adapter_pages, needed, now)
            if adapter is None:  # no slot
                memory.prefix.cancel(nodes)
                return False
            loads.append(adapter)
        if adapter is not None:
            memory.residency.acquire(adapter.digest, now)
        page_ids = memory.take(seq.owner, num_pages, needed)
        assert page_ids is not None, "counted as available above"
        self._run(seq, nodes, page_ids)
        return True

    def _run(self, seq: Sequence, nodes: list[PrefixNode], page_ids: tuple[int, ...]) -> None:
        self.waiting.remove(seq)
        bisect.insort(self.running, seq, key=lambda s: s.arrival)
        seq.nodes = nodes
        seq.page_ids = [n.page_id for n in nodes] + list(page_ids)
        seq.num_computed = len(nodes) * self.memory.page_tokens
        if seq.num_cached is None:
            seq.num_cached = seq.num_computed
        seq.blocked_since, seq.num_overtaken = None, 0

    def _grow(self, seq: Sequence, num_tokens: int) -> bool:
        num_pages = self.memory.pages_for(num_tokens) - len(seq.page_ids)
        if num_pages <= 0:
            return True
        page_ids = self.memory.take(seq.owner, num_pages)
        if page_ids is None:
            return False
        seq.page_ids.extend(page_ids)
        return True

    def _preempt(self, seq: Sequence, now: float) -> None:
        self.running.remove(seq)
        self._release(seq, now)
        bisect.insort(self.waiting, seq, key=lambda s: s.arrival)

    def _release(self, seq: Sequence, now: float) -> None:
        self.memory.give_back(seq.owner, seq.own_page_ids)
        self.memory.prefix.release(seq.nodes, now)
        if seq.digest:
            self.memory.residency.release(seq.digest, now)
        seq.page_ids, seq.nodes, seq.num_computed = [], [], 0

    def _share_full_pages(self, seq: Sequence) -> None:
        page_tokens = self.memory.page_tokens
        while (len(seq.nodes) + 1) * page_tokens <= seq.num_computed:
            i = len(seq.nodes)
            tokens = tuple(seq.token_ids[i * page_tokens : (i + 1) * page_tokens])
            parent = seq.nodes[-1] if seq.nodes else None
            node = self.memory.share(seq.owner, seq.namespace, parent, tokens, seq.page_ids[i])
            seq.page_ids[i] = node.page_id
            seq.nodes.append(node)

    def _chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        end = seq.num_computed + num_tokens
        adapter = self.memory.residency.get(seq.digest) if seq.digest else None
        return ScheduledChunk(
            request_id=seq.request_id,
            start=seq.num_computed,
            token_ids=tuple(seq.token_ids[seq.num_computed : end]),
            page_ids=tuple(seq.page_ids[: self.memory.pages_for(end)]),
            adapter_slot=adapter.slot if adapter else -1,
            samples=end == len(seq.token_ids),
        )
