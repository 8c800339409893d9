from __future__ import annotations

import socket
import threading
import time
from dataclasses import asdict
from typing import Any

import pytest

from engine import process
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.process import EngineProcess
from engine.wire import encode_frame, read_frame
from tests.engine.fakes import Harness

START_S = 1.0


def test_the_time_that_a_start_takes_is_not_taken_for_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def build(*_: Any) -> EngineCore:
        time.sleep(START_S)
        return Harness().core

    monkeypatch.setattr(process, "_build", build)
    monkeypatch.setattr(process, "BEAT_S", 0.01)
    monkeypatch.setattr(process, "keep_what_is_there", lambda: time.sleep(0.1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(asdict(EngineConfig(model="fake"))))
        thread = threading.Thread(target=EngineProcess(theirs).run)
        thread.start()
        assert "ready" in read_frame(ours)
        first = read_frame(ours)
        ours.shutdown(socket.SHUT_WR)
        thread.join()
    assert first["beat"] < START_S
