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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

STOP_TIMEOUT_S = 40.0


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

    def call(self, path: str, body: Any = None, key: str | None = None) -> Answer:
        headers = {"content-type": "application/json"}
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


@contextmanager
def serving(
    flags: Sequence[str], environment: Mapping[str, str] | None = None, name: str = "base"
) -> Iterator[ServeProcess]:
    """`name`: of the base model, which the first line of output tells. Ends it by Ctrl-C."""
    port = _free_port()
    ray_dir = Path(tempfile.mkdtemp(prefix="lf"))  # a short path: sockets live in it
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), *flags]
    # other tests leave settings of their own clusters
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"RAY_TMPDIR": str(ray_dir), **(environment or {})}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"serving {name} at http://127.0.0.1:{port}/v1\n"
            yield ServeProcess(f"http://127.0.0.1:{port}", process, ray_dir)
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
    shutil.rmtree(ray_dir)


def _free_port() -> int:
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
