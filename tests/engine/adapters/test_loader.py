from __future__ import annotations

import gc
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.adapters import image_reader
from engine.adapters.host_memory import HostArena
from engine.adapters.image import AdapterImage, ImageFormat
from engine.adapters.loader import (
    _TICK_S,
    FAILURE_TTL_S,
    REFUSAL_TTL_S,
    STALLED_S,
    AdapterLoader,
    LoadResult,
)
from engine.adapters.loading import load_image
from engine.adapters.manager import STALL_FACTOR
from engine.config import EngineConfig
from engine.errors import AdapterRefused, LorafleetError, ModelNotFound, Unavailable
from engine.request import AdapterRef
from tests.engine.adapters.adapter_dirs import FORMAT, lora_tensors, tensor_name, write_adapter

WAIT_S = 20.0  # for what must come; a test that passes does not wait so long


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Reads:
    """Stands in for reading: blocks adapters by name, counts reads of each."""

    def __init__(self, image: AdapterImage) -> None:
        self.image = image
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.counts: dict[str, int] = {}
        self.started: queue.Queue[str] = queue.Queue()
        self.given_up: queue.Queue[str] = queue.Queue()

    def block(self, name: str) -> None:
        self.gates[name] = threading.Event()

    def load_image(
        self, uri: str, form: ImageFormat, check: Callable[[], None], version: str, disk: None
    ) -> AdapterImage:
        self.counts[uri] = self.counts.get(uri, 0) + 1
        self.started.put(uri)
        if uri in self.gates:
            assert self.gates[uri].wait(WAIT_S)
        try:
            check()
        except Unavailable:
            self.given_up.put(uri)
            raise
        if uri in self.errors:
            raise self.errors[uri]
        return self.image


class Fleet:
    def __init__(self, reads: Reads, **config: Any) -> None:
        self.reads = reads
        self.clock = Clock()
        self.results: queue.Queue[LoadResult] = queue.Queue()
        self.loader = AdapterLoader(
            FORMAT,
            EngineConfig(model="unused", **config),
            self.results.put,
            self.clock,
        )

    def submit(self, name: str, version: str = "1", uri: str | None = None) -> None:
        self.loader.submit(AdapterRef(name, uri or name, version))

    def result(self) -> LoadResult:
        return self.results.get(timeout=WAIT_S)

    def assert_silent(self) -> None:
        with pytest.raises(queue.Empty):
            self.results.get(timeout=0.05)


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    image = load_image(str(write_adapter(tmp_path / "any")), FORMAT)
    reads = Reads(image)
    monkeypatch.setattr(image_reader, "load_image", reads.load_image)
    return reads


@pytest.fixture
def make_fleet(reads: Reads) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(**config: Any) -> Fleet:
        fleets.append(Fleet(reads, **config))
        return fleets[-1]

    before = set(threading.enumerate())
    yield make
    for gate in reads.gates.values():
        gate.set()
    for fleet in fleets:
        fleet.loader.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_result_comes_with_its_reference_and_image(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet()
    fleet.submit("x")
    result = fleet.result()
    assert result.ref == AdapterRef("x", "x", "1")
    assert result.image is not None
    assert result.image.digest == reads.image.digest
    assert result.image.report["adapter"] == "x"
    assert result.error is None


def test_the_time_a_load_took_is_told(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet()
    reads.block("x")
    fleet.submit("x")
    reads.started.get(timeout=WAIT_S)
    fleet.clock.now += 3.0
    reads.gates["x"].set()
    assert fleet.result().seconds == 3.0


def test_one_version_is_read_once_however_often_it_is_asked_for(
    make_fleet: Callable[..., Fleet], reads: Reads
) -> None:
    """FR-34: 50 requests, one download, and every name that asked gets a result of its own."""
    fleet = make_fleet()
    reads.block("uri")
    for index in range(50):
        fleet.submit(f"name{index % 2}", uri="uri")
    fleet.submit("name0", version="2", uri="uri")
    reads.gates["uri"].set()
    results = [fleet.result() for _ in range(3)]
    fleet.assert_silent()
    assert {(r.ref.name, r.ref.version) for r in results} == {("name0", "1"), ("name1", "1"), ("name0", "2")}
    assert reads.counts == {"uri": 2}
    assert all(r.image is not None and r.image.report["adapter"] == r.ref.name for r in results)


def test_it_can_be_read_again_after_it_was_read(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet()
    for _ in range(2):
        fleet.submit("x")
        assert fleet.result().error is None
    assert reads.counts == {"x": 2}


def test_a_slow_load_delays_no_other(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    """FR-34."""
    fleet = make_fleet(max_parallel_loads=2)
    reads.block("slow")
    fleet.submit("slow")
    for index in range(5):
        fleet.submit(f"fast{index}")
    assert {fleet.result().ref.name for _ in range(5)} == {f"fast{index}" for index in range(5)}
    reads.gates["slow"].set()
    assert fleet.result().ref.name == "slow"


def test_loads_that_stall_hold_back_no_other(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    """FR-34: also as many as may run at once."""
    fleet = make_fleet(max_parallel_loads=2, load_timeout_s=1000.0)
    stalled = [f"stalled{index}" for index in range(STALL_FACTOR * 2)]
    for name in stalled:
        reads.block(name)
        fleet.submit(name)
    fleet.submit("fast")
    for count in range(2, len(stalled) + 1, 2):
        assert {reads.started.get(timeout=WAIT_S) for _ in range(2)} <= set(stalled)
        time.sleep(3 * _TICK_S)
        assert len(reads.counts) == count, "it moved a moment ago"
        fleet.clock.now += STALLED_S
    fleet.assert_silent()
    assert "fast" not in reads.counts, "memory is bounded"
    reads.gates[stalled[0]].set()
    assert {fleet.result().ref.name, fleet.result().ref.name} == {stalled[0], "fast"}


def test_no_more_loads_run_at_once_than_configured(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet(max_parallel_loads=3)
    for name in "abcde":
        reads.block(name)
        fleet.submit(name)
    assert {reads.started.get(timeout=WAIT_S) for _ in range(3)} == {"a", "b", "c"}
    assert reads.started.empty()
    reads.gates["b"].set()
    assert reads.started.get(timeout=WAIT_S) == "d"
    for gate in reads.gates.values():
        gate.set()
    assert {fleet.result().ref.name for _ in range(5)} == set("abcde")


@pytest.mark.parametrize(
    ("error", "ttl"),
    [
        (ModelNotFound("gone"), FAILURE_TTL_S),
        (AdapterRefused("bad", param="r"), REFUSAL_TTL_S),  # of the same bytes
        (Unavailable("busy"), FAILURE_TTL_S),
    ],
)
def test_a_failure_is_told_and_remembered_briefly(
    error: LorafleetError, ttl: float, make_fleet: Callable[..., Fleet], reads: Reads
) -> None:
    """FR-26, FR-64."""
    fleet = make_fleet()
    reads.errors["x"] = error
    fleet.submit("x")
    result = fleet.result()
    assert (result.image, result.error) == (None, error)
    fleet.clock.now += ttl - 0.1
    fleet.submit("x")
    assert fleet.result().error is error
    assert reads.counts == {"x": 1}
    del reads.errors["x"]
    fleet.submit("x", version="2")
    assert fleet.result().image is not None
    fleet.clock.now += 0.2
    fleet.submit("x")
    assert fleet.result().image is not None
    assert reads.counts == {"x": 3}


def test_a_remembered_failure_costs_no_thread(reads: Reads) -> None:
    """All who ask while a source is down get it."""
    threads: queue.Queue[threading.Thread] = queue.Queue()
    loader = AdapterLoader(
        FORMAT, EngineConfig(model="unused"), lambda _: threads.put(threading.current_thread())
    )
    reads.errors["x"] = Unavailable("down")
    loader.submit(AdapterRef("x", "x", "1"))
    assert threads.get(timeout=WAIT_S) is not threading.current_thread()
    loader.submit(AdapterRef("x", "x", "1"))
    assert threads.get(timeout=WAIT_S) is threading.current_thread()
    loader.close()


def test_a_failure_that_is_forgotten_is_tried_again(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet()
    reads.errors["x"] = Unavailable("busy")
    fleet.submit("x")
    assert fleet.result().image is None
    del reads.errors["x"]
    for name in "xy":  # nothing is remembered of the other one
        fleet.loader.forget_failure(AdapterRef(name, name, "1"))
    fleet.submit("x")
    assert fleet.result().image is not None


def test_what_is_refused_after_it_was_read_is_not_read_again(
    make_fleet: Callable[..., Fleet], reads: Reads
) -> None:
    fleet = make_fleet()
    error = AdapterRefused("too large", param="pool_bytes")
    fleet.loader.refuse(AdapterRef("x", "x", "1"), error)
    fleet.submit("x")
    assert fleet.result().error is error
    assert reads.counts == {}
    fleet.submit("x", version="2")
    assert fleet.result().image is not None


def test_a_fault_of_ours_is_an_error_for_those_who_wait_and_is_logged(
    make_fleet: Callable[..., Fleet], reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = make_fleet()
    reads.errors["x"] = MemoryError("no memory at /secret/path")
    with caplog.at_level(logging.ERROR):
        fleet.submit("x")
        error = fleet.result().error
    assert error is not None
    assert error.status == 500
    assert "secret" not in error.message
    assert "'x'" in caplog.text
    fleet.submit("y")
    assert fleet.result().image is not None


def test_a_load_beyond_its_deadline_fails_and_its_place_is_free(
    make_fleet: Callable[..., Fleet], reads: Reads
) -> None:
    """FR-34, FR-64: also while its thread is stuck in a read."""
    fleet = make_fleet(max_parallel_loads=1, load_timeout_s=10.0)
    stuck = [f"stuck{index}" for index in range(STALL_FACTOR)]  # all that may run, the stalled included
    for name in stuck:
        reads.block(name)
        fleet.submit(name)
        assert reads.started.get(timeout=WAIT_S) == name
        fleet.clock.now += STALLED_S
    fleet.submit("next")
    fleet.assert_silent()
    fleet.clock.now += 10.0
    results = [fleet.result() for _ in range(STALL_FACTOR + 1)]
    (after,) = [result for result in results if result.error is None]
    assert after.ref.name == "next"
    for result in results:
        if result is not after:
            assert isinstance(result.error, Unavailable)
            assert result.error.retry_after_s is not None
    for name in stuck:
        reads.gates[name].set()
    assert {reads.given_up.get(timeout=WAIT_S) for _ in stuck} == set(stuck)
    fleet.assert_silent()


def test_a_version_can_be_read_again_while_its_stuck_load_is_given_up(
    make_fleet: Callable[..., Fleet], reads: Reads
) -> None:
    fleet = make_fleet(load_timeout_s=10.0)
    reads.block("x")
    fleet.submit("x")
    reads.started.get(timeout=WAIT_S)
    fleet.clock.now += 9.0
    fleet.assert_silent()
    fleet.clock.now += 1.0
    assert isinstance(fleet.result().error, Unavailable)
    stuck = reads.gates.pop("x")
    fleet.clock.now += FAILURE_TTL_S + 1
    fleet.submit("x")
    assert fleet.result().image is not None
    stuck.set()
    assert reads.given_up.get(timeout=WAIT_S) == "x"
    fleet.assert_silent()


def test_a_receiver_that_raises_does_not_stop_the_loader(
    reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    names: queue.Queue[str] = queue.Queue()

    def on_done(result: LoadResult) -> None:
        names.put(result.ref.name)
        raise RuntimeError("receiver")

    config = EngineConfig(model="unused", max_parallel_loads=1)
    loader = AdapterLoader(FORMAT, config, on_done)
    for name in ("a", "b"):
        loader.submit(AdapterRef(name, name, "1"))
        assert names.get(timeout=WAIT_S) == name
    loader.close()
    assert "receiver" in caplog.text


def test_after_close_no_result_comes_and_reads_end(make_fleet: Callable[..., Fleet], reads: Reads) -> None:
    fleet = make_fleet(max_parallel_loads=1)
    reads.block("a")
    fleet.submit("a")
    fleet.submit("queued")
    reads.started.get(timeout=WAIT_S)
    closing = threading.Thread(target=fleet.loader.close)
    closing.start()
    reads.gates["a"].set()
    closing.join(WAIT_S)
    fleet.submit("late")
    fleet.assert_silent()
    assert reads.counts == {"a": 1}
    assert reads.given_up.get(timeout=WAIT_S) == "a"


def test_a_receiver_may_close_the_loader(reads: Reads) -> None:
    closed = threading.Event()

    def on_done(result: LoadResult) -> None:
        loader.close()
        closed.set()

    loader = AdapterLoader(FORMAT, EngineConfig(model="unused"), on_done)
    loader.submit(AdapterRef("a", "a", "1"))
    assert closed.wait(WAIT_S)


def test_real_adapters_are_loaded_and_refused(tmp_path: Path) -> None:
    """FR-26: the files may have vanished since the name was registered."""
    results: queue.Queue[LoadResult] = queue.Queue()
    loader = AdapterLoader(replace(FORMAT, max_rank=4), EngineConfig(model="unused"), results.put)
    good = write_adapter(tmp_path / "good", config={"peft_type": "LORA", "r": 8})
    loader.submit(AdapterRef("good", str(good), "1"))
    assert isinstance(results.get(timeout=WAIT_S).error, AdapterRefused)  # rank 8, the limit is 4
    shutil.rmtree(good)
    loader.submit(AdapterRef("good", str(good), "2"))
    error = results.get(timeout=WAIT_S).error
    assert isinstance(error, ModelNotFound)
    assert str(tmp_path) not in error.message
    loader.close()


def test_a_refusal_that_is_remembered_holds_no_memory(tmp_path: Path) -> None:
    """Values are looked at when pages are half full."""
    tensors = lora_tensors()
    tensors[tensor_name(1, "v_proj", "B")][0, 0] = float("nan")
    path = write_adapter(tmp_path / "nan", tensors)
    arena = HostArena(FORMAT.page_elems, FORMAT.dtype)
    results: queue.Queue[LoadResult] = queue.Queue()
    loader = AdapterLoader(replace(FORMAT, arena=arena), EngineConfig(model="unused"), results.put)
    loader.submit(AdapterRef("nan", str(path), "1"))
    error = results.get(timeout=WAIT_S).error
    loader.close()
    assert isinstance(error, AdapterRefused)
    gc.collect()
    assert arena.num_bytes == arena.file.slab_bytes
    assert len(arena._free) == arena.file.pages_per_slab
