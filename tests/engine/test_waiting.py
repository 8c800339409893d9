"""Who may start next: against a search of everyone, and what fairness promises."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine import waiting
from engine.sequence import Sequence
from engine.waiting import INPUT_WEIGHT, OUTPUT_WEIGHT, WaitingQueue
from tests.engine.simulation import Simulation

CREDIT = 10.0
MAX_CREDIT, TURN = waiting.MAX_CREDIT, waiting.TURN  # tests change them


def sequence(arrival: int, digest: str | None = None) -> Sequence:
    return Sequence(f"r{arrival}", arrival, (1, 2, 3), max_tokens=4, digest=digest)


def fix_credit(monkeypatch: pytest.MonkeyPatch, credit: float) -> None:
    """However large requests are."""
    monkeypatch.setattr(waiting, "MAX_CREDIT", credit)
    monkeypatch.setattr(waiting, "TURN", 1e9)


@pytest.fixture(autouse=True)
def small_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request or two of those here."""
    fix_credit(monkeypatch, CREDIT)


@dataclass
class NaiveQueue:
    counters: dict[str, float] = field(default_factory=dict)
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    floor: float = 0.0

    def of(self, namespace: str) -> list[Sequence]:
        return sorted((s for s in self.waiting if s.namespace == namespace), key=lambda s: s.arrival)

    def add(self, seq: Sequence) -> None:
        counter = self.counters.get(seq.namespace, 0.0)
        self.counters[seq.namespace] = counter if self.of(seq.namespace) else max(counter, self.floor)
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        if not self.waiting:
            self.counters.clear()

    def charge(self, namespace: str, amount: float) -> None:
        if self.waiting:
            self.counters[namespace] = self.counters.get(namespace, self.floor) + amount

    def rank(self, namespace: str) -> float:
        runs = not namespace or any(s.namespace == namespace for s in self.running)
        return self.counters[namespace] - CREDIT * runs

    def look(self) -> None:
        ranks = [self.rank(s.namespace) for s in self.waiting]
        self.floor = max([self.floor, *([min(ranks)] if ranks else [])])


def walk(queue: WaitingQueue, naive: NaiveQueue, rng: random.Random) -> None:
    """One pass; some start, the accounts of others are set aside."""
    naive.look()
    left = list(naive.waiting)
    set_aside: set[str] = set()
    for seq in queue.candidates(set_aside):
        left = [s for s in left if s.namespace not in set_aside]
        assert seq is min(
            (s for s in left if s is min(left, key=lambda o: (o.namespace != s.namespace, o.arrival))),
            key=lambda s: (naive.rank(s.namespace), s.arrival),
        )
        left.remove(seq)
        event = rng.random()
        if event < 0.3:
            queue.start(seq)
            naive.remove(seq)
            naive.running.append(seq)
            naive.charge(seq.namespace, 3 * INPUT_WEIGHT)
        elif event < 0.5:
            set_aside.add(seq.namespace)
        elif event < 0.6:
            return
    assert all(s.namespace in set_aside for s in left)


@pytest.mark.parametrize("seed", range(30))
def test_the_order_equals_a_search_of_everyone(seed: int) -> None:
    rng = random.Random(seed)
    queue, naive = WaitingQueue(is_fair=True), NaiveQueue()
    for arrival in range(200):
        seq = sequence(arrival, rng.choice((None, "a", "b", "c")))
        if naive.running and rng.random() < 0.3:
            stopped = naive.running.pop(rng.randrange(len(naive.running)))
            queue.stop(stopped)
            if rng.random() < 0.5:
                seq = stopped  # preempted: older than others
        queue.add(seq)
        naive.add(seq)
        if rng.random() < 0.3:
            walk(queue, naive, rng)
        for started in rng.sample(naive.running, min(len(naive.running), 2)):
            queue.charge_output(started)
            naive.charge(started.namespace, OUTPUT_WEIGHT)
        if naive.waiting and rng.random() < 0.1:
            aborted = rng.choice(naive.waiting)
            naive.remove(aborted)
            queue.remove(aborted)
        queue.check_invariants()
        assert set(queue) == set(naive.waiting)
        assert len(queue) == len(naive.waiting)
        assert bool(queue) == bool(naive.waiting)
        for namespace, counter in naive.counters.items():
            assert queue.counter(namespace) == counter


def first(queue: WaitingQueue) -> Sequence:
    return next(queue.candidates(()))


def test_the_one_that_was_given_least_comes_first_and_by_arrival_nothing_counts() -> None:
    for is_fair, expected in ((True, "b"), (False, "a")):
        queue = WaitingQueue(is_fair)
        for arrival, digest in enumerate("ab"):
            queue.add(sequence(arrival, digest))
        queue.charge_output(sequence(9, "a"))
        assert first(queue).digest == expected


def test_a_pause_saves_up_nothing() -> None:
    queue = WaitingQueue(is_fair=True)
    for arrival in range(3):
        queue.add(sequence(arrival, "busy"))
    for _ in range(100):
        queue.charge_output(sequence(9, "busy"))
    first(queue)
    queue.add(sequence(3, "back"))
    assert queue.counter("back") == queue.counter("busy")


def test_accounts_that_make_no_difference_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MIN_ACCOUNTS", 3)
    queue = WaitingQueue(is_fair=True)
    queue.add(sequence(0, "0"))
    for arrival in range(1, 1000):
        seq = sequence(arrival, f"{arrival}")
        queue.add(seq)
        queue.charge_output(seq)
        served = first(queue)
        queue.remove(served)
        queue.charge_output(served)
        queue.check_invariants()
    assert len(queue._accounts) <= 10


def test_when_nobody_waits_nobody_is_owed_anything() -> None:
    queue = WaitingQueue(is_fair=True)
    for arrival in range(1000):
        seq = sequence(arrival, f"{arrival % 3}")
        queue.add(seq)
        queue.start(seq)
        queue.charge_output(seq)
        queue.stop(seq)
    assert {queue.counter(f"{i}") for i in range(3)} == {0.0}


# --- in the scheduler


def test_a_noisy_adapter_delays_anothers_request_by_no_more_than_its_share() -> None:
    """FR-32: 1000 requests are queued; the other adapter's one is the next to start, and gets its share."""
    simulation = Simulation(num_pages=200, max_num_seqs=4, fair=True)
    for i in range(1000):
        simulation.submit(f"noisy {i}", 3, max_tokens=8, digest="noisy")
    simulation.steps(20)
    for i in range(5):
        simulation.submit(f"calm {i}", 3, max_tokens=8, digest="calm")
    admitted = [r.split()[0] for plan in simulation.steps(30) for r in plan.admitted]
    assert admitted[:3] == ["calm"] * 3
    assert Counter(admitted)["calm"] == 5


def steps_to_first_token(noise: int, num_steps: int = 600) -> list[float]:
    """Of a tenant that asks every 20th step, beside one that asks `noise` times as often."""
    simulation = Simulation(num_pages=400, max_num_seqs=4, max_num_batched_tokens=16, fair=True)
    arrived: dict[str, float] = {}
    waited: list[float] = []
    rng, noisy_rng = random.Random(0), random.Random(1)
    for step in range(num_steps):
        if rng.random() < 0.05:
            arrived[f"calm {step}"] = simulation.now
            simulation.submit(f"calm {step}", 24, max_tokens=8, digest="calm")
        for i in range(noise):
            if noisy_rng.random() < 0.05:
                simulation.submit(f"noisy {step} {i}", 24, max_tokens=8, digest="noisy")
        simulation.step()
        answered = [name for name in arrived if simulation.clients[name].output]
        waited.extend(simulation.now - arrived.pop(name) for name in answered)
    assert len(arrived) <= 1
    return sorted(waited)


@pytest.mark.parametrize("max_credit", [56.0, MAX_CREDIT])  # a request, and far more than a turn
def test_a_tenant_at_its_share_waits_three_times_as_long_at_most_beside_one_at_ten_times(
    max_credit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-32: at the 99th percentile; the noisy one's queue only grows."""
    monkeypatch.setattr(waiting, "MAX_CREDIT", max_credit)
    monkeypatch.setattr(waiting, "TURN", TURN)
    p99 = [waited[int(0.99 * (len(waited) - 1))] for waited in map(steps_to_first_token, (0, 10))]
    assert 1.0 < p99[0] < p99[1] <= 3 * p99[0]


def test_adapters_with_long_queues_are_given_equal_tokens_whatever_the_size_of_their_requests() -> None:
    simulation = Simulation(num_pages=400, max_num_seqs=4, fair=True, prefix_cache=False)
    for i in range(150):
        simulation.submit(f"a{i}", 30, max_tokens=3, digest="short answers")
        simulation.submit(f"b{i}", 3, max_tokens=12, digest="long answers")
    simulation.steps(200)
    given = Counter[str]()
    for client in simulation.clients.values():
        if client.output:
            assert client.digest is not None
            given[client.digest] += int(
                INPUT_WEIGHT * len(client.prompt) + OUTPUT_WEIGHT * len(client.output)
            )
    assert given["short answers"] == pytest.approx(given["long answers"], rel=0.05)


def test_recomputing_after_a_preemption_is_not_charged() -> None:
    simulation = Simulation(num_pages=4, num_slots=0, prefix_cache=False, fair=True)
    simulation.submit("old", 3, max_tokens=13)
    simulation.submit("young", 3, max_tokens=13)
    while not simulation.step().preempted:
        pass
    simulation.submit("waits", 8)
    charged = simulation.scheduler.waiting.counter("")
    plan = simulation.step()
    while "young" not in plan.admitted:
        charged += OUTPUT_WEIGHT * sum(chunk.samples for chunk in plan.chunks)
        plan = simulation.step()
    assert simulation.running() == {"young"}
    num_sampled = sum(chunk.samples for chunk in plan.chunks)
    assert simulation.scheduler.waiting.counter("") == charged + OUTPUT_WEIGHT * num_sampled


@pytest.mark.parametrize(("credit", "least", "most"), [(0.0, 3.0, 4.0), (300.0, 1.0, 2.0)])
def test_adapters_take_turns_of_a_few_requests(
    credit: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer adapters in a batch; after a while all have been given the same."""
    fix_credit(monkeypatch, credit)
    simulation = Simulation(num_pages=200, num_slots=10, max_num_seqs=4, fair=True)
    for i in range(1000):
        # of different lengths, so that they do not all end in the same step
        simulation.submit(f"{i}", 3, max_tokens=5 + i % 7, digest=f"{i % 10}")
    num_adapters = [len({c.adapter_slot for c in plan.chunks}) for plan in simulation.steps(600)]
    assert least <= sum(num_adapters) / len(num_adapters) <= most
    given = Counter(c.digest for c in simulation.clients.values() for _ in c.output)
    assert min(given.values()) > 0.5 * max(given.values())
