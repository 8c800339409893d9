"""Ranks that somebody else starts: they find rank 0, show the token, and serve as its children do."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.client import EngineClient
from engine.errors import InvalidRequest, Unavailable
from engine.tensor_parallel import messages, seats
from engine.tensor_parallel.messages import Kind
from engine.tensor_parallel.seats import TOKEN_ENV, Guest, accept_guests, connect, reserve_address
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

TOKEN = "a secret of the group"
IP_LOCAL_PORT_RANGE = 51  # of linux/in.h; Python has no name for it yet


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    place, address = reserve_address("127.0.0.1")
    with place:
        yield address


@contextmanager
def guests(address: str, num_ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [
        subprocess.Popen([sys.executable, "-m", "engine.tensor_parallel.worker", address, str(rank)])
        for rank in range(1, num_ranks)
    ]
    try:
        yield processes
        for process in processes:
            process.wait(timeout=20)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_group_of_guests_gives_the_tokens_of_one_process(
    tmp_path: Path, address: str, num_ranks: int
) -> None:
    base = make_llama(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "a", rank=8, targets=ALL_LINEAR, seed=0)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    with guests(address, num_ranks):
        for settings in ({}, {"tensor_parallel_size": num_ranks, "rank_address": address}):
            engine = Engine(EngineConfig(str(base), num_pages=100, num_threads=1, **settings))  # type: ignore[arg-type]
            engine.load_adapter("a", str(adapter))
            texts.append([output.text for output in engine.generate(["abc"] * 2, params, [None, "a"])])
            engine.close()
    assert texts[0] == texts[1]


@pytest.mark.anyio
async def test_what_a_guest_cannot_serve_is_what_the_engine_tells(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one of several hosts has no such model; the first rank waits for that one meanwhile."""
    base = make_llama(tmp_path / "base")
    with guests(address, 2):  # they look for it here
        monkeypatch.chdir(tmp_path)
        client = EngineClient(EngineConfig(base.name, tensor_parallel_size=2, rank_address=address))
        with pytest.raises(InvalidRequest) as error:
            await client.start()
    assert error.value.param == "model"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guest_that_dies_or_hangs_ends_the_group_within_ten_seconds(
    tmp_path: Path, address: str, kind: int
) -> None:
    base = make_llama(tmp_path / "base")
    with guests(address, 2) as (guest,):
        command = [sys.executable, "-m", "tests.engine.group_process", str(base), address]
        files = tmp_path / "files"
        files.mkdir()
        environment = {**os.environ, "TMPDIR": str(files)}
        group = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert group.stdout is not None
        assert group.stdout.readline() == "serving\n"
        os.kill(guest.pid, kind)
        began = time.monotonic()
        group.communicate(timeout=30)
        assert group.returncode not in (0, None)
        assert time.monotonic() - began < 10
        assert not any(files.glob("lorafleet-*"))
        guest.kill()  # who started it ends it if it hangs


def accept(address: str, num_ranks: int, into: list[Guest]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.extend(accept_guests(address, num_ranks)))
    thread.start()
    return thread


def hello(address: str, frame: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    for _ in range(100):
        try:
            sock = socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            time.sleep(0.05)
        else:
            sock.sendall(frame)
            return sock
    raise AssertionError("nobody listens")


@pytest.mark.parametrize(
    "frame",
    [
        messages.encode_json(Kind.HELLO, ["another secret", 1]),
        messages.encode_json(Kind.HELLO, [TOKEN, 5]),
        messages.encode_json(Kind.HELLO, [TOKEN, "1"]),
        messages.encode_json(Kind.HELLO, 7),
        messages.encode_json(Kind.READY, [TOKEN, 1]),
        messages.encode(Kind.HELLO, b"no json"),
        messages.encode(Kind.HELLO, b" " * 5000),
        messages.encode(Kind.HELLO, b"[" * 1020),
        messages.encode_json(Kind.HELLO, ["\ud800", 1]),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_who_does_not_belong_is_turned_away_and_the_rank_still_comes(address: str, frame: bytes) -> None:
    came: list[Guest] = []
    thread = accept(address, 2, came)
    with hello(address, frame) as stranger:
        assert _is_closed(stranger)
        with connect(address, 1) as ours:
            thread.join(timeout=10)
            (guest,) = came
            guest.sock.sendall(b"x")
            assert ours.recv(1) == b"x"
            guest.stop()
            assert _is_closed(ours)


def test_who_speaks_slowly_holds_nobody_up_for_long(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "HELLO_TIMEOUT_S", 0.5)
    came: list[Guest] = []
    thread = accept(address, 2, came)
    began = time.monotonic()
    with hello(address, messages.encode(Kind.HELLO, b" " * 1000)[:5]) as stranger:
        with suppress(OSError):  # it is turned away
            while time.monotonic() - began < 5.0:
                stranger.sendall(b" ")
                time.sleep(0.1)
        with connect(address, 1):
            thread.join(timeout=10)
            (guest,) = came
            guest.stop()
    assert time.monotonic() - began < 5.0


def test_ranks_meet_over_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    came: list[Guest] = []
    try:
        place, address = reserve_address("[::1]")
    except OSError:
        pytest.skip("this machine has no IPv6")
    thread = accept(address, 2, came)
    with place, connect(address, 1):
        thread.join(timeout=10)
        (guest,) = came
        guest.stop()


def test_an_address_that_is_reserved_goes_to_nobody_else(address: str) -> None:
    """Before the engine process listens, another group may begin, and others may ask for any port."""
    host, _, port = address.rpartition(":")
    one_port = struct.pack("I", int(port) | int(port) << 16)
    for reuses in (0, 1):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            try:
                other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, one_port)
            except OSError:
                pytest.skip("this kernel cannot be told which ports to pick from")
            with pytest.raises(OSError, match="in use"):
                other.bind((host, 0))


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_rank_that_does_not_come_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "CONNECT_TIMEOUT_S", 0.2)
    with pytest.raises(Unavailable, match=r"ranks \[1, 2\]"):
        accept_guests(address, 3)


def test_without_a_token_nobody_is_let_in(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV)
    with pytest.raises(InvalidRequest) as caught:
        accept_guests(address, 2)
    assert caught.value.param == "rank_address"


def test_a_rank_ends_with_a_rank_0_that_dies_while_the_group_is_built(tmp_path: Path, address: str) -> None:
    """It waits in the rendezvous then, and hears nothing."""
    config = EngineConfig(str(make_llama(tmp_path / "base")), tensor_parallel_size=2, num_pages=60)
    came: list[Guest] = []
    thread = accept(address, 2, came)
    with guests(address, 2) as (process,):
        thread.join(timeout=30)
        (guest,) = came
        frame = messages.encode_json(Kind.CONFIG, [asdict(config), 1, str(tmp_path / "rendezvous")])
        guest.sock.sendall(frame)
        time.sleep(2.0)
        assert process.poll() is None
        guest.stop()
        assert process.wait(timeout=10) == 0
