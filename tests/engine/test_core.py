"""The engine's body over a fake runner and a fake loader: what happens around a step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.errors import (
    InvalidRequest,
    LorafleetError,
    Overloaded,
    RequestTooLarge,
    Unavailable,
)
from engine.request import AdapterRef
from engine.snapshot import SnapshotFeed, apply_news, snapshot
from engine.stats import BASE
from tests.engine.fakes import PAGE_BYTES, Harness, image

A = AdapterRef("a", "dir/a", "1")
B = AdapterRef("b", "dir/b", "1")
C = AdapterRef("c", "dir/c", "1")


def test_base_request_runs_at_once() -> None:
    harness = Harness()
    harness.add("r", max_tokens=3)
    harness.run()
    assert harness.tokens["r"] == [0, 0, 0]
    assert harness.ends["r"].finish_reason == "length"
    harness.assert_nothing_is_held()


def test_cold_adapter_delays_nobody_else() -> None:
    """FR-34: requests for base and for a warm adapter run while another one is being read."""
    harness = Harness()
    harness.add("warm-up", B)
    harness.loaded(B, image(2))
    harness.run()
    harness.add("cold", A)
    harness.add("base")
    harness.add("warm", B)
    harness.run()
    assert harness.ends.keys() >= {"base", "warm"}
    assert "cold" not in harness.ends
    harness.loaded(A, image(1))
    harness.run()
    assert harness.tokens["cold"] == [1, 1, 1, 1]


def test_fifty_requests_cause_one_load() -> None:
    """FR-34: one load in flight a version, shared by its waiters."""
    harness = Harness()
    for i in range(50):
        harness.add(f"r{i}", A)
    assert harness.loader.submitted == [A]
    harness.loaded(A, image(1))
    harness.run()
    assert len(harness.ends) == 50
    stats = harness.core.stats.adapters["a"]
    assert (stats.misses, stats.loads, stats.hbm_hits, stats.host_hits) == (50, 1, 0, 0)


def test_hits_are_counted_by_tier() -> None:
    harness = Harness(max_adapters=1)
    for ref, number in ((A, 1), (B, 2)):
        harness.add(f"cold-{ref.name}", ref)
        harness.loaded(ref, image(number))
        harness.run()
    harness.add("b-again", B)
    harness.add("a-again", A)
    harness.run()
    assert harness.core.stats.adapters["b"].hbm_hits == 1
    assert harness.core.stats.adapters["a"].host_hits == 1
    assert harness.core.stats.hbm_evictions == {"slot": 2}
    assert harness.loader.submitted == []


def test_loads_that_are_called_for_take_no_slot_from_those_who_run() -> None:
    """FR-24: they stay in host memory; a request for one waits, and that is counted."""
    harness = Harness(max_adapters=2, max_overtaken_s=0.1)
    for ref, number in ((A, 1), (B, 2)):
        harness.add(ref.name, ref, max_tokens=60)
        harness.loaded(ref, image(number))
    harness.step()
    for i in range(20):
        harness.core.load_adapter(f"load {i}", C)
        if C in harness.loader.submitted:
            harness.loaded(C, image(3))
        harness.step()
        assert harness.answers[f"load {i}"]["status"] == "ok"
        if i % 5 == 4:
            harness.core.unload_adapter(f"unload {i}", "c")
    assert snapshot(harness.core)["evictions_blocked"] == {}
    harness.add("waits", C)
    harness.loaded(C, image(3))
    harness.run()
    assert [harness.tokens[r] for r in ("a", "b", "waits")] == [[1] * 60, [2] * 60, [3] * 4]
    assert snapshot(harness.core)["evictions_blocked"] == {"slot": 1}


def test_failed_load_is_an_error_for_its_own_requests_only() -> None:
    """FR-26."""
    harness = Harness()
    harness.add("bad", A)
    harness.add("bad-too", A)
    harness.add("good", B)
    harness.loaded(A, InvalidRequest("tensor x", param="x"))
    harness.loaded(B, image(2))
    harness.run()
    assert {r for r, end in harness.ends.items() if end.error} == {"bad", "bad-too"}
    assert harness.tokens["good"] == [2, 2, 2, 2]
    harness.assert_nothing_is_held()


def test_a_cancelled_waiter_does_not_cancel_the_load() -> None:
    """FR-34."""
    harness = Harness()
    harness.add("stays", A)
    harness.add("leaves", A)
    harness.core.abort("leaves")
    harness.collect()
    assert harness.ends["leaves"].finish_reason == "abort"
    harness.loaded(A, image(1))
    harness.run()
    assert harness.tokens["stays"] == [1, 1, 1, 1]
    assert harness.tokens["leaves"] == []


def test_abort_returns_everything() -> None:
    """FR-56."""
    harness = Harness()
    harness.add("cold", A)
    harness.add("running", max_tokens=50)
    harness.step(3)
    harness.add("waiting", B)
    for request_id in ("cold", "running", "waiting", "unknown"):
        harness.core.abort(request_id)
    harness.collect()
    assert set(harness.ends) == {"cold", "running", "waiting"}
    harness.assert_nothing_is_held()


def test_a_step_is_submitted_before_the_one_before_is_collected() -> None:
    harness = Harness(max_in_flight=2)
    harness.add("r", max_tokens=3)
    harness.step(2)
    assert len(harness.runner.in_flight) == 1
    assert harness.tokens["r"] == [0]
    assert not harness.core.is_idle
    harness.run()
    assert harness.tokens["r"] == [0, 0, 0]
    assert harness.runner.in_flight == []
    harness.assert_nothing_is_held()


def test_a_token_in_flight_of_an_aborted_request_is_not_anothers_of_that_id() -> None:
    harness = Harness(max_in_flight=2)
    harness.add("r", A, max_tokens=9)
    harness.loaded(A, image(1))
    harness.step(2)
    harness.core.abort("r")
    harness.collect()
    assert harness.ends.pop("r").finish_reason == "abort"
    harness.add("r", max_tokens=2)
    harness.run()
    assert harness.tokens["r"] == [0, 0]
    harness.assert_nothing_is_held()


def test_a_second_request_of_an_id_is_refused_and_costs_the_first_nothing() -> None:
    harness = Harness()
    harness.add("r", max_tokens=3)
    harness.core.step()
    with pytest.raises(InvalidRequest, match="id") as caught:
        harness.add("r")
    assert caught.value.param == "request_id"
    harness.run()
    assert harness.tokens["r"] == [0, 0, 0]
    harness.assert_nothing_is_held()


def test_full_queue_is_told_at_once() -> None:
    harness = Harness(max_queued_requests=2)
    harness.add("1", A)
    harness.add("2", A)
    with pytest.raises(Overloaded) as caught:
        harness.add("3")
    assert caught.value.retry_after_s
    harness.loaded(A, image(1))
    harness.run()
    harness.add("3")


@pytest.mark.parametrize(
    ("length", "params", "param"),
    [
        (0, {}, "prompt"),
        (300, {}, "prompt"),
        (128, {"max_tokens": None}, "prompt"),
        (100, {"max_tokens": 29}, "max_tokens"),
        (5, {"stop_token_ids": (256,)}, "stop_token_ids"),
        (5, {"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused_and_costs_nothing(
    length: int, params: dict[str, Any], param: str
) -> None:
    """FR-36, FR-53: with the numbers, before anything is queued."""
    harness = Harness()
    with pytest.raises(InvalidRequest) as caught:
        harness.add("r", length=length, **params)
    assert caught.value.param == param
    harness.assert_nothing_is_held()
    harness.add("next")
    harness.run()
    assert harness.ends["next"].finish_reason == "length"


def test_too_long_for_the_pool_beside_its_adapter() -> None:
    """FR-36: the adapter's own pages count; the error comes when the adapter's size is known."""
    harness = Harness(num_pages=10)
    harness.add("fits-without-adapter", A, length=30, max_tokens=6)
    harness.loaded(A, image(1, num_pages=2))
    error = harness.ends["fits-without-adapter"].error
    assert isinstance(error, RequestTooLarge)
    assert "36" in error.message
    assert "32 tokens" in error.message
    harness.assert_nothing_is_held()


def test_adapter_that_can_never_fit_the_pool_is_refused() -> None:
    """FR-37: needed and configured bytes."""
    harness = Harness(num_pages=10)
    harness.add("r", A)
    harness.loaded(A, image(1, num_pages=10))
    error = harness.ends["r"].error
    assert error is not None
    assert str(10 * PAGE_BYTES) in error.message
    assert error.param == "pool_bytes"
    assert harness.core.manager.cache.used_bytes == 0


def test_adapter_that_can_never_fit_host_memory_is_refused() -> None:
    """FR-37."""
    harness = Harness(host_cache_bytes=150)
    harness.core.load_adapter("call", A)
    harness.loaded(A, image(1, num_pages=2))
    assert "150" in harness.answers["call"].message
    assert str(2 * PAGE_BYTES) in harness.answers["call"].message


def test_stop_token_is_told_and_eos_is_not() -> None:
    harness = Harness()
    harness.add("stop", A, stop_token_ids=(7,))
    harness.loaded(A, image(7))
    harness.add("eos", B)
    harness.loaded(B, image(255))
    harness.add("ignored", B, ignore_eos=True)
    harness.run()
    assert (harness.ends["stop"].finish_reason, harness.ends["stop"].stop_token_id) == ("stop", 7)
    assert (harness.ends["eos"].finish_reason, harness.ends["eos"].stop_token_id) == ("stop", None)
    assert harness.ends["ignored"].finish_reason == "length"


def test_adapter_that_left_host_memory_is_read_again() -> None:
    """The host cache may be smaller than what the queue needs: it costs loads, never a request."""
    harness = Harness(host_cache_bytes=2 * PAGE_BYTES, max_adapters=1)
    for ref, number in ((A, 1), (B, 2)):
        harness.add(f"first-{ref.name}", ref)
        harness.loaded(ref, image(number))
        harness.run()
    assert "digest-1" not in harness.core.manager
    harness.add("again", A)
    assert harness.loader.submitted == [A]
    harness.loaded(A, image(1))
    harness.run()
    assert harness.tokens["again"] == [1] * 4


def test_content_that_changed_while_a_request_waited_is_an_error() -> None:
    harness = Harness(host_cache_bytes=2 * PAGE_BYTES, max_adapters=1)
    harness.add("long", A, max_tokens=30)
    harness.loaded(A, image(1))
    harness.step(2)
    harness.add("b", B)
    harness.loaded(B, image(2))  # takes A's place in host memory
    harness.add("queued", A, max_tokens=3)
    harness.core.abort("long")
    harness.run()
    if "queued" not in harness.ends:
        harness.loaded(A, image(3))
        harness.run()
        assert isinstance(harness.ends["queued"].error, Unavailable)
    assert set(harness.ends) == {"long", "b", "queued"}


def test_prefetch_loads_without_a_request() -> None:
    harness = Harness()
    harness.core.prefetch(A)
    harness.core.prefetch(A)
    assert harness.loader.submitted == [A]
    harness.loaded(A, image(1))
    harness.add("r", A)
    harness.run()
    assert harness.core.stats.adapters["a"].host_hits == 1


def test_close_closes_the_loader() -> None:
    harness = Harness()
    harness.core.close()
    assert harness.loader.is_closed


@pytest.mark.parametrize("seed", range(20))
def test_soak(seed: int) -> None:
    """Random arrivals, some late, hints, loads, failures, reloads, unloads, aborts: one end each, no leak,
    right weights."""
    rng = random.Random(seed)
    harness = Harness(
        num_pages=24,
        max_adapters=3,
        host_cache_bytes=rng.choice([3, 6, 20]) * 2 * PAGE_BYTES,
        max_parallel_loads=2,
        max_in_flight=rng.choice([1, 2]),
    )
    feed, followed = SnapshotFeed(harness.core), dict[str, Any]()
    versions = {f"n{i}": 1 for i in range(6)}
    numbers: dict[AdapterRef, int] = {}
    expected: dict[str, int] = {}
    for step in range(300):
        name = rng.choice(list(versions))
        is_late = versions[name] > 1 and rng.random() < 0.1
        ref = AdapterRef(name, f"dir/{name}", str(versions[name] - is_late))
        numbers.setdefault(ref, len(numbers) + 1)
        roll = rng.random()
        if roll < 0.3:
            adapter = rng.choice([None, ref])
            harness.add(f"r{step}", adapter, length=rng.randint(1, 20), max_tokens=rng.randint(1, 12))
            expected[f"r{step}"] = numbers[ref] if adapter else 0
        elif roll < 0.35 and harness.core.requests:
            harness.core.abort(rng.choice(list(harness.core.requests)))
        elif roll < 0.4:
            versions[name] += 1
        elif roll < 0.44:
            harness.core.unload_adapter(f"u{step}", name)
        elif roll < 0.46:
            harness.core.load_adapter(f"l{step}", ref)
        elif roll < 0.49:
            harness.core.prefetch(ref)
        elif roll < 0.65 and harness.loader.submitted:
            _end_a_load(harness, rng, numbers)
        harness.step()
        if rng.random() < 0.5:
            followed = apply_news(followed, feed.news())
            whole = snapshot(harness.core)
            assert followed["adapters"].keys() == whole["adapters"].keys()
            for name, entry in whole["adapters"].items():
                assert followed["adapters"][name] == entry, name
            assert followed == whole
    while harness.core.requests or harness.loader.submitted:
        if harness.loader.submitted:
            _end_a_load(harness, rng, numbers)
        harness.step()
    manager = harness.core.manager
    meant = {manager.digest_of(name) for name in manager.names}
    assert meant.issuperset(manager.cache.digests)
    assert meant.issuperset(adapter.digest for adapter in harness.core.memory.residency)
    assert {BASE, *manager.names}.issuperset(harness.core.stats.adapters)
    assert set(harness.ends) == set(expected)
    for request_id, number in expected.items():
        assert set(harness.tokens[request_id]) <= {number}, "tokens of another adapter"
    harness.assert_nothing_is_held()


def _end_a_load(harness: Harness, rng: random.Random, numbers: dict[AdapterRef, int]) -> None:
    ref = rng.choice(harness.loader.submitted)
    result = image(numbers[ref], num_pages=1 + numbers[ref] % 3)
    failure: LorafleetError = Unavailable("storm", retry_after_s=1.0)
    harness.loaded(ref, failure if rng.random() < 0.2 else result)


def test_news_tell_of_changes_only() -> None:
    harness = Harness()
    feed = SnapshotFeed(harness.core)
    for ref, number in ((A, 1), (B, 2)):
        harness.add(ref.name, ref)
        harness.loaded(ref, image(number))
    harness.run()
    assert feed.news()["adapters"].keys() == {"_base", "a", "b"}
    harness.add("again", A)
    harness.run()
    assert feed.news()["adapters"].keys() == {"a"}
    harness.core.unload_adapter("call", "b")
    news = feed.news()
    assert (news["adapters"], news["gone"]) == ({}, ["b"])
    assert feed.news()["adapters"] == {}
