"""The embedded S3 answers other processes, and is gone when it should be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.demo.s3 import EmbeddedS3

pytestmark = pytest.mark.cluster


@pytest.fixture
def s3() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        yield server


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10.0
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_another_process_reads_what_was_uploaded(s3: EmbeddedS3, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "weights.bin").write_bytes(b"0123456789")
    (tmp_path / "top.json").write_text("{}")
    assert s3.upload(tmp_path, "models", "adapters/demo") == "s3://models/adapters/demo"

    script = (
        "import boto3\n"
        "client = boto3.client('s3')\n"
        "for item in client.list_objects_v2(Bucket='models')['Contents']: print(item['Key'])\n"
        "part = client.get_object(Bucket='models', Key='adapters/demo/one/weights.bin', Range='bytes=2-4')\n"
        "print(part['Body'].read().decode())\n"
    )
    output = subprocess.check_output([sys.executable, "-c", script], env={**os.environ, **s3.env}, text=True)
    assert output.split() == ["adapters/demo/one/weights.bin", "adapters/demo/top.json", "234"]


def test_a_second_upload_uses_the_same_bucket(s3: EmbeddedS3, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for prefix in ("a", "b"):
        s3.upload(tmp_path, "models", prefix)
    listed = s3.client().list_objects_v2(Bucket="models")["Contents"]
    assert [item["Key"] for item in listed] == ["a/file", "b/file"]


def test_stop_ends_the_server(s3: EmbeddedS3) -> None:
    pid = s3.pid
    s3.stop()
    assert not is_running(pid)
    s3.stop()  # harmless


def test_a_killed_server_starts_again_empty_at_the_same_address(s3: EmbeddedS3) -> None:
    pid, endpoint_url = s3.pid, s3.endpoint_url
    s3.client().create_bucket(Bucket="models")
    s3.kill()
    assert not is_running(pid)
    s3.start()
    assert s3.endpoint_url == endpoint_url
    assert s3.client().list_buckets()["Buckets"] == []


def test_the_server_ends_with_a_killed_parent() -> None:
    script = (
        "import time\n"
        "from deployments.demo.s3 import EmbeddedS3\n"
        "server = EmbeddedS3()\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert wait_until_gone(pid)
