from __future__ import annotations

import pytest

from engine.deadlines import Deadlines
from engine.errors import Overloaded
from engine.request import AdapterRef
from engine.sequence import Sequence
from engine.waiting import INPUT_WEIGHT, OUTPUT_WEIGHT
from tests.engine.fakes import Harness, image

SQL = AdapterRef("sql", "dir/sql", "1")


def queue(**counts: int) -> list[Sequence]:
    """Requests of 10 prompt tokens and at most 5 output tokens."""
    return [
        Sequence(f"{name}{i}", i, tuple(range(10)), max_tokens=5, digest=name)
        for name, count in counts.items()
        for i in range(count)
    ]


WORK = 10 * INPUT_WEIGHT + 5 * OUTPUT_WEIGHT


def busy(deadlines: Deadlines, work_a_second: float) -> None:
    for i in range(100):
        deadlines.served(int(work_a_second / INPUT_WEIGHT / 10), 0, i * 0.1)


def expected_wait_s(deadlines: Deadlines, namespace: str, waiting: list[Sequence]) -> float:
    """Of a request of 10 prompt tokens that comes after a step."""
    deadlines.served(0, 0, 0.0, is_queued=False)
    return deadlines.expected_wait_s(namespace, 10, waiting)


def test_the_wait_is_the_work_ahead_at_the_rate_of_late() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    expected = 3 + 10 * INPUT_WEIGHT / WORK  # those before it, then its own prompt
    assert expected_wait_s(deadlines, "a", queue(a=3)) == pytest.approx(expected, rel=0.02)


def test_of_a_long_queue_of_others_only_the_fair_share_counts() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    alone = expected_wait_s(deadlines, "calm", queue(noisy=1, calm=1))
    assert expected_wait_s(deadlines, "calm", queue(noisy=1000, calm=1)) < 1.5 * alone
    assert expected_wait_s(deadlines, "noisy", queue(noisy=1000, calm=1)) > 900


def test_without_a_queue_or_without_experience_nobody_is_refused() -> None:
    deadlines = Deadlines()
    assert expected_wait_s(deadlines, "a", queue(a=100)) == 0.0
    busy(deadlines, WORK)
    assert expected_wait_s(deadlines, "a", []) == 0.0


def test_the_queue_is_looked_at_once_a_step_and_who_comes_meanwhile_is_counted() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    three, four = queue(a=3), queue(a=4)
    before = deadlines.expected_wait_s("a", 10, three)
    deadlines.queued(four[3])
    after = deadlines.expected_wait_s("a", 10, iter(()))
    assert after == pytest.approx(before + 1, rel=0.02)
    deadlines.served(0, 0, 10.0, is_queued=False)
    assert deadlines.expected_wait_s("a", 10, four) == after
    deadlines.served(0, 0, 10.0, is_queued=False)
    assert deadlines.expected_wait_s("a", 10, []) == 0.0


def test_outputs_are_expected_to_be_as_long_as_those_before() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    longest = expected_wait_s(deadlines, "a", queue(a=9))
    deadlines.ended(9)
    for _ in range(200):
        deadlines.ended(1)
    shorter = (10 * INPUT_WEIGHT + OUTPUT_WEIGHT) / WORK
    assert expected_wait_s(deadlines, "a", queue(a=9)) == pytest.approx(longest * shorter, rel=0.1)


def test_pauses_do_not_slow_the_rate() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    before = expected_wait_s(deadlines, "a", queue(a=3))
    deadlines.served(1, 0, 1000.0)
    assert expected_wait_s(deadlines, "a", queue(a=3)) == before


def test_what_a_preempted_request_has_sampled_already_is_not_expected_again() -> None:
    deadlines = Deadlines()
    busy(deadlines, WORK)
    (seq,) = queue(a=1)
    for _ in range(4):
        seq.append(7)
    left = (14 * INPUT_WEIGHT + OUTPUT_WEIGHT + 10 * INPUT_WEIGHT) / WORK
    assert expected_wait_s(deadlines, "a", [seq]) == pytest.approx(left, rel=0.02)


def test_those_that_ended_long_before_their_deadline_are_not_kept() -> None:
    deadlines = Deadlines()
    for i in range(10, 0, -1):
        deadlines.add(f"lasts {i}", 1e9 + i)
    for i in range(1000):
        deadlines.add(f"{i}", 2e9 + i)
        deadlines.forget(f"{i}")
    assert len(deadlines._heap) < 100
    assert [deadlines.take_passed(1e9 + i) for i in range(1, 11)] == [[f"lasts {i}"] for i in range(1, 11)]


def test_deadlines_pass_in_their_order_and_once() -> None:
    deadlines = Deadlines()
    for request_id, deadline in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        deadlines.add(request_id, deadline)
    deadlines.forget("a")
    deadlines.add("a", 2.5)
    assert deadlines.take_passed(1.9) == []
    assert deadlines.take_passed(2.5) == ["b", "a"]
    assert deadlines.take_passed(9.0) == ["c"]
    assert deadlines.take_passed(9.0) == []


# --- in the engine


def fill(harness: Harness, count: int, prefix: str = "q") -> None:
    for i in range(count):
        harness.add(f"{prefix}{i}", length=8, max_tokens=8)


def test_a_request_that_would_come_too_late_is_refused_at_once_and_told_when_to_come_again() -> None:
    harness = Harness(max_num_seqs=1, fairness="arrival")
    fill(harness, 50)
    harness.step(20)
    with pytest.raises(Overloaded, match="expected in") as refused:
        harness.add("hasty", timeout_s=0.5)
    assert refused.value.param == "timeout_s"
    assert refused.value.retry_after_s is not None
    assert 1.0 < refused.value.retry_after_s < 10.0
    assert "hasty" not in harness.core.requests
    harness.add("patient", timeout_s=60.0)
    harness.run()
    assert harness.ends["patient"].finish_reason == "length"


def test_a_request_that_has_waited_too_long_is_given_up_and_one_that_runs_is_not() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("runs", max_tokens=40, timeout_s=0.05)
    harness.add("waits", timeout_s=0.1)
    harness.add("cold", SQL, timeout_s=0.1)
    harness.run()
    assert harness.ends["runs"].finish_reason == "length"
    for request_id in ("waits", "cold"):
        assert isinstance(harness.ends[request_id].error, Overloaded)
    harness.loaded(SQL, image(1))
    harness.assert_nothing_is_held()


def test_an_id_that_is_used_again_has_its_own_deadline() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("first", max_tokens=30)
    harness.add("r", timeout_s=0.1)
    harness.core.abort("r")
    harness.collect()
    del harness.ends["r"]
    harness.add("r", timeout_s=5.0)
    harness.run()
    assert harness.ends["r"].finish_reason == "length"
