"""A rank's part of adapters, from rank 0's LOAD to its DROP."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.adapters.image import AdapterImage
from engine.adapters.image_reader import WantedImage
from engine.errors import AdapterRefused, LorafleetError
from engine.tensor_parallel import messages
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
