"""Small tensors through a ring of pinned memory: nothing is overwritten before it was read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import engine.runner.uploads
from engine.runner.uploads import Uploads


class SlowDevice:
    """Reads when it must: when somebody waits for it, or now and then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_waits = self.num_read = 0
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        monkeypatch.setattr(engine.runner.uploads, "read_host", lambda *call: self._pending.append(call))

    @property
    def num_put(self) -> int:
        return self.num_read + len(self._pending)

    def read(self, count: int) -> None:
        for source, out in self._pending[:count]:
            out.copy_(source)
        del self._pending[:count]
        self.num_read += count

    def make_event(self) -> Any:
        return Event(self)


class Event:
    def __init__(self, device: SlowDevice) -> None:
        self._device = device
        self._sequence = 0

    def record(self) -> None:
        self._sequence = self._device.num_put

    def query(self) -> bool:
        return self._device.num_read >= self._sequence

    def synchronize(self) -> None:
        while not self.query():
            self._device.num_waits += 1
            self._device.read(1)


def test_what_arrives_is_what_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    device = SlowDevice(monkeypatch)
    uploads = Uploads(torch.device("cpu"), ring_bytes=1024, make_event=device.make_event)
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(500):
        tensors = [
            torch.full((rng.randrange(40),), i, dtype=torch.int64),
            torch.full((2, rng.randrange(5)), i + 0.5),
        ]
        if i == 300:
            tensors.append(torch.arange(1000))  # more than the ring holds
        outs = uploads.put(*tensors)
        expected += zip(tensors, outs, strict=True)
        if rng.random() < 0.3:
            device.read(rng.randrange(device.num_put - device.num_read + 1))
    device.read(device.num_put - device.num_read)
    assert all(torch.equal(tensor, out) and tensor.dtype == out.dtype for tensor, out in expected)
    assert device.num_waits > 0, "the ring was never full"


def test_a_device_that_keeps_up_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice(monkeypatch)
    uploads = Uploads(torch.device("cpu"), ring_bytes=1024, make_event=device.make_event)
    for i in range(200):
        uploads.put(torch.full((20,), i))
        device.read(max(0, device.num_put - device.num_read - 2))
    assert device.num_waits == 0
