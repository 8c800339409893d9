"""Real Ray Serve, real router and replicas, fake engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.request import AdapterRef
from tests.cluster.conftest import NODE, App, StartApp
from tests.cluster.fake_engine import DIE_AT_START, DIE_AT_THIRD, DIE_ONCE_AT_THIRD, NO_END, OVERLOADED

pytestmark = pytest.mark.cluster


def eventually(condition: Callable[[], bool], timeout_s: float) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - started


def num_loads(app: App) -> int:
    return sum(stats["num_loads"] for stats in app.stats())


def test_calls_inside_one_request_all_finish_and_stay_with_their_adapters(start_app: StartApp) -> None:
    """Serve matches calls by ids that these share: they hang, or take each other's replica.

    One slot a replica: each adapter has one place. 48 calls on 8 seats and 16 ongoing requests: most of them
    queue in the router, base calls between them. They take long enough that none ends before the replicas
    have told what is in use there: an adapter may spread to where the other one is idle.
    """
    app = start_app({"token_s": 0.1, "load_s": 0.2}, max_adapters=1)
    app.generate({"adapter": "a"}, {"adapter": "b"})
    answers = app.generate(*[{"adapter": "a"}, {"adapter": "b"}, {}] * 16)
    assert [answer["tokens"] for answer in answers] == [3] * 48
    places = [{answer["pid"] for answer in answers[offset::3]} for offset in (0, 1)]
    assert [len(pids) for pids in places] == [1, 1]
    assert places[0] != places[1]
    assert num_loads(app) == 2
    routes = Counter[str]()
    for stats in app.stats():
        routes.update(stats["routes"])
    assert routes.total() == 50
    assert routes["balance"] == 16


def test_a_hot_adapter_spreads_into_free_capacity_and_others_stay_put(start_app: StartApp) -> None:
    """FR-60: it spreads within 10 s, and the cold replica loads it once."""
    app = start_app({"token_s": 0.05, "load_s": 0.1})
    app.generate({"adapter": "hot"})
    answers = app.generate(*[{"adapter": "hot", "max_tokens": 20}] * 16)
    assert {a["tokens"] for a in answers} == {20}
    assert len({a["pid"] for a in answers}) == 2
    assert num_loads(app) == 2


def test_a_hot_adapter_does_not_evict_what_is_in_use(start_app: StartApp) -> None:
    """FR-60: a copy more needs a slot that nobody uses; waiting is better than a load storm."""
    app = start_app({"token_s": 0.05, "load_s": 0.1}, max_adapters=1)
    app.generate({"adapter": "hot"}, {"adapter": "other"})
    assert num_loads(app) == 2
    others = app.start(*[{"adapter": "other", "max_tokens": 80}] * 2)
    time.sleep(1.0)  # until routers know that they are there
    answers = app.generate(*[{"adapter": "hot", "max_tokens": 10}] * 12)
    assert {a["tokens"] for a in answers} == {10}
    assert num_loads(app) == 2
    assert {a["tokens"] for a in others.result(timeout_s=30)} == {80}


def test_a_closed_stream_frees_its_seat(shared_app: App) -> None:
    """FR-56."""
    app, before = shared_app, sum(s["num_aborted"] for s in shared_app.stats())
    app.generate(*[{"adapter": "a", "max_tokens": 1000, "close_after": 2}] * 6)
    eventually(lambda: sum(s["running"] + s["waiting"] for s in app.stats()) == 0, timeout_s=2)
    assert sum(s["num_aborted"] for s in app.stats()) == before + 6
    assert app.generate({"adapter": "a"})[0]["tokens"] == 3


def test_errors_keep_their_kind(shared_app: App) -> None:
    answers = shared_app.generate(
        {"prompt": [OVERLOADED]}, {"adapter": "bad", "uri": "refused:"}, {"prompt": [NO_END]}, {}
    )
    assert [a["error"] for a in answers] == ["Overloaded", "AdapterRefused", "EngineDead", None]


def test_a_lost_replica_costs_a_retry_or_an_error_and_comes_back_warm(
    start_app: StartApp, tmp_path: Path
) -> None:
    """FR-59, FR-65, FR-66."""
    app = start_app({"token_s": 0.02}, preloaded=(AdapterRef("static", "x"),))
    before = {stats["pid"] for stats in app.stats()}
    assert len(before) == 2

    # before the first token: answered by the other one
    marker = str(tmp_path / "died")
    answer = app.generate({"prompt": [DIE_AT_START], "id": marker})[0]
    assert (answer["error"], answer["tokens"]) == (None, 3)
    assert Path(marker).exists()
    eventually(lambda: len(app.stats()) == 2, timeout_s=20)
    replacement = next(stats for stats in app.stats() if stats["pid"] not in before)
    assert replacement["adapters"]["static"]["tier"] == "hbm"

    # after a token, of an answer that nobody has seen: all of it from the other one
    marker = str(tmp_path / "died in the middle")
    others = {stats["pid"] for stats in app.stats()}
    (answer,) = app.generate({"prompt": [DIE_ONCE_AT_THIRD], "id": marker, "max_tokens": 9, "whole": True})
    assert (answer["error"], answer["tokens"]) == (None, 9)
    assert Path(marker).exists()
    eventually(lambda: len(app.stats()) == 2, timeout_s=20)
    assert int(answer["pid"]) in others & {stats["pid"] for stats in app.stats()}

    # after a token that was seen: an error, and nothing twice
    (broken,) = app.generate({"prompt": [DIE_AT_THIRD], "max_tokens": 9})
    assert (broken["error"], broken["tokens"]) == ("EngineDead", 2)
    assert app.generate({})[0]["error"] is None


def test_an_adapter_is_loaded_and_unloaded_on_every_replica(shared_app: App) -> None:
    """FR-58."""
    app = shared_app
    report = app.service("load_adapter", AdapterRef("everywhere", "x"))
    assert report["status"] == "ok"
    assert [s["adapters"]["everywhere"]["tier"] for s in app.stats()] == ["hbm", "hbm"]
    assert 'lorafleet_adapter_loaded{adapter="everywhere"' in app.service("metrics_text")
    app.service("unload_adapter", "everywhere")
    assert ["everywhere" in s["adapters"] for s in app.stats()] == [False, False]
    app.service("check_health")


def test_a_replica_that_hangs_hides_no_other(shared_app: App) -> None:
    """Nothing has died, so Serve needs half a minute to notice."""
    app = shared_app
    hung, well = (stats["pid"] for stats in app.stats())
    os.kill(hung, signal.SIGSTOP)
    try:
        started = time.monotonic()
        app.service("check_health")
        assert time.monotonic() - started < 1.0
        assert [stats["pid"] for stats in app.stats()] == [well]
    finally:
        os.kill(hung, signal.SIGCONT)


def test_a_fleet_that_is_full_still_answers_its_operator(shared_app: App) -> None:
    """Serve lets every call wait for a place among the requests, and these take longer than a probe waits."""
    app = shared_app
    running = app.start(*[{"max_tokens": 200}] * 20)
    eventually(lambda: sum(s["running"] + s["waiting"] for s in app.stats()) == 16, timeout_s=2)
    started = time.monotonic()
    app.service("check_health")
    assert "lorafleet_" in app.service("metrics_text")
    assert time.monotonic() - started < 1.0
    assert {answer["tokens"] for answer in running.result(timeout_s=60)} == {200}


def test_an_upgrade_under_load_loses_nothing(start_app: StartApp) -> None:
    """FR-66: other settings, so every replica is replaced, while requests come; running ones finish."""
    app = start_app({"token_s": 0.01}, grace_s=10.0)
    before = {stats["pid"] for stats in app.stats()}
    is_over = threading.Event()

    def ask(number: int) -> list[dict[str, Any]]:
        answers = []
        while not is_over.is_set():
            answers += app.generate({"adapter": f"a{number}", "max_tokens": 20})
        return answers

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, number) for number in range(4)]
        start_app({"token_s": 0.011}, of=app, grace_s=10.0)
        eventually(lambda: not before & {stats["pid"] for stats in app.stats()}, timeout_s=30)
        is_over.set()
    answers = [answer for one in asking for answer in one.result()]
    assert Counter((answer["error"], answer["tokens"]) for answer in answers) == {(None, 20): len(answers)}
    assert {int(answer["pid"]) for answer in answers} & before
    assert len(app.stats()) == 2


def test_a_node_that_dies_takes_its_own_streams_only(ray_cluster: Any, start_app: StartApp) -> None:
    """FR-65: Ray on two nodes; what ran on the other one is untouched, and both replicas are there again."""
    node = ray_cluster.add_node(**NODE)
    app = start_app({"token_s": 0.02})
    before = {stats["pid"] for stats in app.stats()}
    running = app.start(*[{"max_tokens": 150}] * 4)
    eventually(lambda: sum(stats["running"] for stats in app.stats()) == 4, timeout_s=5)
    ray_cluster.remove_node(node, allow_graceful=False)
    answers = running.result(timeout_s=60)
    assert {answer["error"] for answer in answers} == {None, "EngineDead"}
    assert all((answer["error"] is None) == (answer["tokens"] == 150) for answer in answers)
    eventually(lambda: len(app.stats()) == 2, timeout_s=60)
    assert len(before & {stats["pid"] for stats in app.stats()}) == 1
    assert {answer["error"] for answer in app.generate(*[{}] * 8)} == {None}
