"""Requests that wait, in the order in which they may start. Pure: no clock, no memory.

Fair between adapters by served tokens: an account for each adapter, one for the base model, counts what it
was given (virtual token counters; Sheng et al., "Fairness in Serving Large Language Models", 2023), and the
account that was given least comes first; within an account the oldest request. An account that comes back
after a pause is lifted to where the others are: a pause saves up nothing. When nobody waits, nobody is owed
anything: counters are forgotten, and nothing is counted.

Every adapter in a batch is read in every step and holds pages, so an account that runs already is ranked as
if it had been given less: adapters take turns of TURN requests, as large as requests were lately, and of
MAX_CREDIT at most.

Not fair means by arrival only: nothing is counted, so all accounts are equal.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Container, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain

from engine.sequence import Sequence

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 4.0
"""An output token at batch 64 takes about four times the GPU time of a prompt token (8B model, H200)."""

TURN = 6.0
"""Requests. Replayed at saturation, twice as many gain up to 1 % of the tokens a second; but an adapter that
asks rarely then waits more than three times as long beside one that floods a small engine.
"""

MAX_CREDIT = 4000.0
"""Weighted tokens. Two adapters that wait can be so far apart, and no further."""

_MEMORY = 64
"""Requests: about so many make up their mean size."""

_MIN_ACCOUNTS = 1024
"""Fewer are not worth a look for those that can be forgotten."""


@dataclass(slots=True)
class _Account:
    counter: float
    waiting: list[Sequence] = field(default_factory=list)  # by arrival


class WaitingQueue:
    def __init__(self, is_fair: bool) -> None:
        self._input_weight = INPUT_WEIGHT if is_fair else 0.0
        self._output_weight = OUTPUT_WEIGHT if is_fair else 0.0
        self._credit = MAX_CREDIT if is_fair else 0.0
        self._mean_size, self._num_sizes = self._credit / TURN, 0  # of requests, in weighted tokens
        # requests by namespace; one more of the base model, whose weights are always read
        self._running = Counter({"": 1})
        self._accounts: dict[str, _Account] = {}  # by namespace
        self._waiting: dict[str, _Account] = {}  # of these, those that have a waiting request
        # (rank, arrival, namespace), at least one for each of `_waiting` that is not too late. Most changes
        # make an entry too early; when it comes up it goes where it belongs.
        self._heap: list[tuple[float, int, str]] = []
        self._floor = 0.0  # the least rank of waiting accounts, when it was last looked at
        self._num_remembered = _MIN_ACCOUNTS

    def __len__(self) -> int:
        return sum(len(account.waiting) for account in self._waiting.values())

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In no order that matters."""
        return chain.from_iterable(account.waiting for account in self._waiting.values())

    @property
    def namespaces(self) -> Set[str]:
        """Of waiting requests; it follows the changes."""
        return self._waiting.keys()

    def counter(self, namespace: str) -> float:
        """Weighted tokens that an account was given, or was lifted past."""
        account = self._accounts.get(namespace)
        return account.counter if account else self._floor

    def add(self, seq: Sequence) -> None:
        account = self._account(seq.namespace)
        if not account.waiting:
            account.counter = max(account.counter, self._floor)
            self._waiting[seq.namespace] = account
        bisect.insort(account.waiting, seq, key=_arrival)
        if account.waiting[0] is seq:
            self._push(seq.namespace, account)

    def remove(self, seq: Sequence) -> None:
        account = self._waiting[seq.namespace]
        index = bisect.bisect_left(account.waiting, seq.arrival, key=_arrival)
        assert account.waiting[index] is seq
        del account.waiting[index]
        if not account.waiting:
            del self._waiting[seq.namespace]
        if not self._waiting:
            self._accounts.clear()
            self._heap.clear()

    def start(self, seq: Sequence) -> None:
        """It has its pages, and runs."""
        self.remove(seq)
        self._running[seq.namespace] += 1
        if not self._waiting:
            return
        account = self._account(seq.namespace)
        if seq.num_outputs == 0:  # what a preempted one computes again is not its account's fault
            account.counter += self._input_weight * seq.num_uncomputed
        if account.waiting and self._running[seq.namespace] == 1:
            self._push(seq.namespace, account)

    def stop(self, seq: Sequence) -> None:
        """It runs no more: it has ended, or waits again."""
        num_inputs = len(seq.prompt_token_ids) - (seq.num_cached or 0)
        size = self._input_weight * num_inputs + self._output_weight * seq.num_outputs
        self._num_sizes = min(self._num_sizes + 1, _MEMORY)
        self._mean_size += (size - self._mean_size) / self._num_sizes
        self._running[seq.namespace] -= 1
        if not self._running[seq.namespace]:
            del self._running[seq.namespace]

    def charge_output(self, seq: Sequence) -> None:
        if self._waiting:
            self._account(seq.namespace).counter += self._output_weight

    def candidates(self, set_aside: Container[str]) -> Iterator[Sequence]:
        """Waiting requests in their order, each once, without those of namespaces in `set_aside`.

        In between the caller may remove the one it got, charge, and set more aside, but not add any.
        """
        self._adapt_credit()
        self._mend_top()
        heap = self._heap.copy()
        num_passed: dict[str, int] = {}  # requests of an account that were looked at, and wait on
        while heap:
            rank, arrival, namespace = heap[0]
            account = self._waiting.get(namespace)
            index = num_passed.get(namespace, 0)
            if account is None or index >= len(account.waiting) or namespace in set_aside:
                heapq.heappop(heap)
                continue
            seq = account.waiting[index]
            now = (self._rank(namespace, account), seq.arrival)
            if (rank, arrival) != now:
                heapq.heapreplace(heap, (*now, namespace))
                continue
            yield seq
            if index < len(account.waiting) and account.waiting[index] is seq:
                num_passed[namespace] = index + 1

    def check_invariants(self) -> None:
        assert self._waiting == {n: a for n, a in self._accounts.items() if a.waiting}
        entries = {namespace: (rank, arrival) for rank, arrival, namespace in sorted(self._heap)[::-1]}
        assert all(count > 0 for count in self._running.values())
        for namespace, account in self._waiting.items():
            arrivals = [seq.arrival for seq in account.waiting]
            assert arrivals == sorted(set(arrivals))
            assert all(seq.namespace == namespace for seq in account.waiting)
            assert entries[namespace] <= (self._rank(namespace, account), arrivals[0])

    def _rank(self, namespace: str, account: _Account) -> float:
        """Who comes first: the least."""
        return account.counter - self._credit if namespace in self._running else account.counter

    def _push(self, namespace: str, account: _Account) -> None:
        entry = (self._rank(namespace, account), account.waiting[0].arrival, namespace)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._waiting):
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._rank(n, a), a.waiting[0].arrival, n) for n, a in self._waiting.items()]
        heapq.heapify(self._heap)

    def _adapt_credit(self) -> None:
        credit = min(MAX_CREDIT, TURN * self._mean_size)
        if abs(credit - self._credit) > self._credit / 4:  # all ranks change with it
            self._credit = credit
            self._rebuild()

    def _account(self, namespace: str) -> _Account:
        account = self._accounts.get(namespace)
        if account is None:
            if len(self._accounts) >= self._num_remembered:
                self._forget()
            account = self._accounts[namespace] = _Account(self._floor)
        return account

    def _forget(self) -> None:
        """Accounts that would be lifted to the floor if they came back: as if they had never been."""
        kept = {n: a for n, a in self._accounts.items() if a.waiting or a.counter > self._floor}
        self._accounts = kept
        self._num_remembered = 2 * len(kept) + _MIN_ACCOUNTS

    def _mend_top(self) -> None:
        """Make the first entry a true one, and learn the least rank from it."""
        heap = self._heap
        while heap:
            rank, arrival, namespace = heap[0]
            account = self._waiting.get(namespace)
            if account is None:
                heapq.heappop(heap)
                continue
            now = (self._rank(namespace, account), account.waiting[0].arrival)
            if (rank, arrival) == now:
                self._floor = max(self._floor, rank)
                return
            heapq.heapreplace(heap, (*now, namespace))


def _arrival(seq: Sequence) -> int:
    return seq.arrival
