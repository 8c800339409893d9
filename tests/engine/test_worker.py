"""A rank's part of adapters, from rank 0's LOAD to its DROP."""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import WantedImage
from engine.adapters.manager import STALL_FACTOR
from engine.config import EngineConfig
from engine.errors import AdapterRefused, LorafleetError
from engine.tensor_parallel import messages, worker
from engine.tensor_parallel.messages import Kind
from engine.tensor_parallel.worker import Worker
from tests.engine.fakes import FakeRunner, image


class Reader:
    """Gives what the test puts there."""

    def __init__(self) -> None:
        self.wanted: queue.Queue[WantedImage] = queue.Queue()
        self.results: queue.Queue[AdapterImage | LorafleetError] = queue.Queue()

    def read(self, wanted: WantedImage) -> AdapterImage:
        self.wanted.put(wanted)
        result = self.results.get(timeout=10)
        if isinstance(result, LorafleetError):
            raise result
        return result

    def close(self) -> None: ...


class Rank:
    def __init__(self) -> None:
        self.sock, self._theirs = socket.socketpair()
        self.reader = Reader()
        built = SimpleNamespace(runner=FakeRunner(), form=None)
        self.worker = Worker(self._theirs, cast("Any", built), num_loads=1, reader=self.reader)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with pytest.raises(EOFError):
            self.worker.run()

    def send(self, kind: Kind, *message: Any) -> None:
        self.sock.sendall(messages.encode_json(kind, message))

    def loaded(self) -> list[Any]:
        kind, payload = messages.read(self.sock)
        assert kind is Kind.LOADED
        answer: list[Any] = json.loads(payload)
        return answer

    def end(self) -> None:
        """All that rank 0 has sent is done."""
        self.sock.shutdown(socket.SHUT_WR)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.sock.close()
        self._theirs.close()

    @property
    def num_held(self) -> int:
        """Numbers and images."""
        return len(self.worker._images) + len(self.worker._reading)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def test_a_part_is_kept_until_it_is_dropped(rank: Rank) -> None:
    rank.reader.results.put(image(3))
    rank.send(Kind.LOAD, 0, "dir/a", "1")
    assert rank.loaded() == [0, "digest-3", None]
    assert rank.num_held == 1
    rank.send(Kind.DROP, 0)
    rank.end()
    assert rank.num_held == 0


def test_a_failed_load_leaves_nothing(rank: Rank) -> None:
    """Rank 0 drops it when it has heard of the failure."""
    rank.reader.results.put(AdapterRefused("no", param="r"))
    rank.send(Kind.LOAD, 0, "dir/a", "1")
    assert rank.loaded()[2]["message"] == "no"
    rank.send(Kind.DROP, 0)
    rank.end()
    assert rank.num_held == 0


def test_a_part_that_is_dropped_while_it_is_read_is_not_kept(rank: Rank) -> None:
    rank.send(Kind.LOAD, 0, "dir/a", "1")
    wanted = rank.reader.wanted.get(timeout=10)
    assert not wanted.is_over()
    rank.send(Kind.DROP, 0)
    rank.end()
    assert wanted.is_over()
    rank.reader.results.put(image(3))
    assert rank.loaded() == [0, "digest-3", None]
    assert rank.num_held == 0


def test_loads_that_stall_hold_back_no_other(rank: Rank) -> None:
    """Rank 0 starts others meanwhile, and waits for their parts here."""
    for number in range(STALL_FACTOR):
        rank.send(Kind.LOAD, number, f"dir/{number}", "1")
    for _ in range(STALL_FACTOR):
        rank.reader.wanted.get(timeout=5)
    for number in range(STALL_FACTOR):
        rank.reader.results.put(image(number))
    assert {rank.loaded()[0] for _ in range(STALL_FACTOR)} == set(range(STALL_FACTOR))
    rank.end()


def fail(*args: object) -> None:
    raise RuntimeError("a step failed")


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_rank_that_cannot_go_on_ends_at_once(is_reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a read hangs: its connection is reset, as by a rank 0 that is killed, or its step fails."""
    reader, ends = Reader(), threading.Event()
    runner = FakeRunner()
    built = SimpleNamespace(runner=runner, form=None, geometry=SimpleNamespace(num_pages=60))
    monkeypatch.setattr(runner, "finish", fail)
    monkeypatch.setattr(worker, "build_rank", lambda *args: built)
    monkeypatch.setattr(worker, "start_readers", lambda config: reader)
    monkeypatch.setattr(os, "_exit", lambda code: ends.set())
    monkeypatch.setattr(worker, "keep_what_is_there", lambda: None)
    # it looks for the end too, and may do so when this test's `_exit` has gone
    monkeypatch.setattr(worker, "_end_with", lambda sock: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
    thread = threading.Thread(target=worker.serve, args=(theirs,))
    thread.start()
    with sock:
        config = asdict(EngineConfig("base", tensor_parallel_size=2))
        sock.sendall(messages.encode_json(Kind.CONFIG, [config, 1, "rendezvous"]))
        assert messages.read(sock)[0] is Kind.READY
        sock.sendall(messages.encode_json(Kind.LOAD, [0, "dir/a", "1"]))
        reader.wanted.get(timeout=10)
        if is_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        else:
            sock.sendall(messages.encode_json(Kind.FINISH, [0]))
        has_ended = ends.wait(timeout=3)
        reader.results.put(image(0))
        thread.join(timeout=10)
    theirs.close()
    assert has_ended
