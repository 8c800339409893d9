"""Real S3 servers for tests, and adapters put into them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

START_TIMEOUT_S = 30.0
WEED = Path(sys.executable).with_name("weed")


@contextmanager
def serve_moto() -> Iterator[str]:
    """Yields the endpoint URL. Believes any credentials."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_client(endpoint: str, key_id: str = "id", secret: str = "secret") -> S3Client:
    session = boto3.session.Session(key_id, secret, region_name="us-east-1")
    return session.client("s3", endpoint_url=endpoint)


def upload(client: S3Client, path: Path, prefix: str, bucket: str = "models") -> None:
    for file in path.iterdir():
        client.upload_file(str(file), bucket, f"{prefix}/{file.name}")


@dataclass(frozen=True)
class Identity:
    name: str
    actions: tuple[str, ...]  # like "Read:bucket/prefix/*"

    @property
    def key_id(self) -> str:
        return f"{self.name}-key-id"

    @property
    def secret(self) -> str:
        return f"{self.name}-secret"


ADMIN = Identity("admin", ("Admin", "Read", "List", "Write"))


@contextmanager
def serve_seaweedfs(path: Path, identities: Iterable[Identity]) -> Iterator[str]:
    """Yields the endpoint URL. Keeps everything under `path`; believes `ADMIN` and the others only."""
    config = path / "identities.json"
    config.write_text(json.dumps({"identities": [_as_json(i) for i in (ADMIN, *identities)]}))
    (path / "data").mkdir()
    servers = ("master", "volume", "filer", "s3")
    ports = _free_ports(2 * len(servers))
    command = [
        str(WEED), "mini", f"-dir={path}/data", f"-s3.config={config}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
        "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in zip(servers, ports, strict=False)),
        *(f"-{name}.port.grpc={port}" for name, port in zip(servers, ports[len(servers) :], strict=True)),
    ]  # fmt: skip
    with (path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{ports[servers.index('s3')]}"
    try:
        _wait_until_it_stores(endpoint, process)
        yield endpoint
    finally:
        process.kill()  # nothing of it is kept
        process.wait()


def _as_json(identity: Identity) -> dict[str, object]:
    return {
        "name": identity.name,
        "credentials": [{"accessKey": identity.key_id, "secretKey": identity.secret}],
        "actions": identity.actions,
    }


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def _wait_until_it_stores(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    client = make_client(endpoint, ADMIN.key_id, ADMIN.secret)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket="probe")
            client.put_object(Bucket="probe", Key="probe", Body=b"x")
        except (BotoCoreError, ClientError):
            assert process.poll() is None, "weed ended"
            assert time.monotonic() < deadline, "weed does not answer"
            time.sleep(0.05)
        else:
            client.delete_object(Bucket="probe", Key="probe")
            client.close()
            return
