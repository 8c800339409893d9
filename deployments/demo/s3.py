"""An S3 server for the demo and for tests: moto in a child process, so that it shares nobody's GIL.

The child ends when its parent does, however the parent ends: it waits for the end of its standard input.
Buckets live in the child's memory and end with it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STOP_TIMEOUT_S = 5.0


class EmbeddedS3:
    """Use as a context manager, or call `start` and `stop`."""

    def __init__(self) -> None:
        self.port = 0  # 0: any free one, taken at the first start
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return when the server answers; a second start keeps the port. Raises RuntimeError if it cannot."""
        assert self._process is None, "already started"
        command = [sys.executable, "-m", "deployments.demo.s3", str(self.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError("the embedded S3 server did not start: is lorafleet[demo] installed?")
        self.port = int(line)

    def stop(self) -> None:
        """End the server and forget its buckets; harmless when it is not running."""
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)  # closes its stdin, at which it ends
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def kill(self) -> None:
        """End the server at once, in the middle of whatever it answers."""
        assert self._process is not None, "not started"
        self._process.kill()
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that send boto3 of any process here."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",  # any value: moto checks none
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """A boto3 client of this server, whatever the environment says."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name=self.env["AWS_DEFAULT_REGION"],
        )

    def upload(self, folder: Path, bucket: str, prefix: str) -> str:
        """Create the bucket if needed, copy the folder's files under the prefix, return the s3:// URI."""
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            client.upload_file(str(file), bucket, f"{prefix}/{file.relative_to(folder).as_posix()}")
        return f"s3://{bucket}/{prefix}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def serve(port: int) -> None:
    """The child's main: print the port, then serve until standard input ends."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
