"""Where the other ranks run, and the stream to each: children of this process, or others that connect to it.

With `rank_address` somebody else starts them, on this machine or on others, as

    LORAFLEET_GROUP_TOKEN=SECRET python -m engine.tensor_parallel.worker HOST:PORT RANK

once for each rank from 1 on, before or after the engine starts, which needs the same token. Ranks that do not
show the token are turned away; they hear numbers and JSON only, but what they hear is not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Protocol

from engine.errors import InvalidRequest, Unavailable
from engine.tensor_parallel import messages
from engine.tensor_parallel.messages import Kind

TOKEN_ENV = "LORAFLEET_GROUP_TOKEN"
CONNECT_TIMEOUT_S = 120.0  # until all have come, and for one until the first rank listens
STOP_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 5.0
DEAD_AFTER_S = 6  # a machine that is gone answers nothing
_RETRY_S = 0.2


class Seat(Protocol):
    """One rank's process."""

    sock: socket.socket

    def stop(self) -> None:
        """End its stream, with which it ends, and wait for that."""

    def kill(self) -> None: ...


class Child:
    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.tensor_parallel.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.sock.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Guest:
    """Started by somebody else, who also ends it if it hangs."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def stop(self) -> None:
        self.kill()
        self.sock.close()

    def kill(self) -> None:
        with suppress(OSError):  # it is gone already
            self.sock.shutdown(socket.SHUT_RDWR)


def accept_guests(address: str, num_ranks: int) -> list[Guest]:
    """Ranks 1 to `num_ranks` - 1, in order. Raises Unavailable if one does not come."""
    token = os.environ.get(TOKEN_ENV)
    if not token:
        raise InvalidRequest(f"rank_address needs a secret in {TOKEN_ENV}", param="rank_address")
    guests: dict[int, Guest] = {}
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    with _listen(address) as server:
        while len(guests) < num_ranks - 1:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                sock, _ = server.accept()
            except (TimeoutError, BlockingIOError):
                missing = sorted(set(range(1, num_ranks)) - guests.keys())
                raise Unavailable(f"ranks {missing} of the group have not come") from None
            rank = _greet(sock, token)
            if rank is None or not 0 < rank < num_ranks or rank in guests:
                sock.close()
            else:
                _notice_death(sock)
                guests[rank] = Guest(sock)
    return [guests[rank] for rank in sorted(guests)]


def connect(address: str, rank: int) -> socket.socket:
    """As a guest. Raises OSError if nobody listens for long."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            sock = socket.create_connection(_parse(address), timeout=CONNECT_TIMEOUT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            break
    sock.settimeout(None)
    _notice_death(sock)
    sock.sendall(messages.encode_json(Kind.HELLO, [os.environ[TOKEN_ENV], rank]))
    return sock


def reserve_address(host: str) -> tuple[socket.socket, str]:
    """Where `accept_guests` can listen, in any process; while the socket is open nobody else gets it."""
    place = socket.socket(_family(host))
    # bound and not listened at, its port goes to those only who also set this and ask for it by its number
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(_parse(f"{host}:0"))
    return place, f"{host}:{place.getsockname()[1]}"


def _greet(sock: socket.socket, token: str) -> int | None:
    """The rank of who has the token."""
    try:
        kind, payload = messages.read(sock, max_bytes=1024, deadline=time.monotonic() + HELLO_TIMEOUT_S)
        theirs, rank = json.loads(payload)
        is_ours = kind is Kind.HELLO and hmac.compare_digest(str(theirs).encode(), token.encode())
    except (OSError, EOFError, ValueError, TypeError, RecursionError):
        return None
    sock.settimeout(None)
    return rank if is_ours and isinstance(rank, int) else None


def _notice_death(sock: socket.socket) -> None:
    """Also of a machine, which closes nothing when it goes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    # of what was sent and is not acknowledged, where keepalive says nothing
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


def _listen(address: str) -> socket.socket:
    host, port = _parse(address)
    return socket.create_server((host, port), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
