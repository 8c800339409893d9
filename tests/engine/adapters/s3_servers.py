"""Real S3 servers for tests, and adapters put into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from moto.server import ThreadedMotoServer

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


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
