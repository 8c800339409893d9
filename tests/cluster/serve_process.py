"""`lorafleet serve` in a process of its own, as a user runs it, and a plain HTTP client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx2

STOP_TIMEOUT_S = 40.0
# what the command lines of a server's processes hold
ENGINE = "engine.process"
REPLICA = "ray::ServeReplica:lorafleet:engine"
INGRESS = "ray::ServeReplica:lorafleet:ingress"
CATALOG = "ray::ServeReplica:lorafleet:catalog"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any  # JSON where it is JSON, else text
    headers: dict[str, str]  # names in lower case


@dataclass(frozen=True, slots=True)
class ServeProcess:
    url: str
    process: subprocess.Popen[str]
    ray_dir: Path
    key: str | None = None  # of callers that give none

    def call(self, path: str, body: Any = None, key: str | None = None) -> Answer:
        headers = {"content-type": "application/json"}
        key = key or self.key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=60) as answer:
                return Answer(answer.status, _body(answer.read()), _headers(answer.headers))
        except HTTPError as error:
            return Answer(error.code, _body(error.read()), _headers(error.headers))

    def complete(self, model: str, key: str | None = None, **options: Any) -> Answer:
        body = {"model": model, "prompt": "abc", "max_tokens": 8, "temperature": 0, **options}
        return self.call("/v1/completions", body, key)

    def stream(self, model: str, max_tokens: int, on_text: Callable[[str], None]) -> Stream:
        """`on_text` is told all text so far, event by event."""
        body = {"model": model, "prompt": "a", "max_tokens": max_tokens, "temperature": 0, "stream": True}
        stream = Stream()
        try:
            with httpx2.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    stream.take(line)
                    on_text(stream.text)
        except httpx2.TransportError as error:
            stream.broken = type(error).__name__
        return stream

    def pids(self, holding: str = "") -> list[int]:
        """Of the processes below the server's that live and whose command lines hold that."""
        children = _children()
        found: list[int] = []
        queue = [self.process.pid]
        while queue:
            below = children.get(queue.pop(), [])
            queue.extend(below)
            found.extend(pid for pid in below if not holding or holding in _command(pid))
        return sorted(found)


@dataclass(slots=True)
class Stream:
    """What a client has seen of one."""

    text: str = ""
    is_done: bool = False
    error: dict[str, Any] | None = None
    broken: str | None = None  # the connection's end

    def take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line:
            event = json.loads(line.removeprefix("data: "))
            self.error = event.get("error")
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))


@contextmanager
def serving(
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    name: str = "base",
    key: str | None = None,
) -> Iterator[ServeProcess]:
    """`name`: of the base model, which the first line of output tells. Ends all of it at once."""
    port = free_port()
    ray_dir = Path(tempfile.mkdtemp(prefix="lf"))  # a short path: sockets live in it
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), *flags]
    # other tests leave settings of their own clusters
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(ray_dir), **(environment or {})}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        server = ServeProcess(f"http://127.0.0.1:{port}", process, ray_dir, key)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"serving {name} at {server.url}/v1\n"
            yield server
        finally:
            _kill(server)
    shutil.rmtree(ray_dir)


def _kill(server: ServeProcess) -> None:
    """A stop that lets all finish takes seconds; `test_serve.py` and `test_deaths.py` see to it."""
    pids = server.pids()
    server.process.kill()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(_command(pid) for pid in pids):  # they write into the folder
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return children


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _headers(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _body(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()
