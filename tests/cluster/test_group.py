"""A replica of two ranks behind the real server: it answers, and when a rank dies it is replaced.

Its model is in S3: every process of the fleet finds it there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.cluster.serve_process import ServeProcess, serving
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload
from tests.tiny import ALL_LINEAR, make_adapter, make_llama

pytestmark = pytest.mark.cluster


def test_a_group_of_two_ranks_serves_and_is_replaced_when_one_dies(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    adapters = tmp_path / "adapters"
    path = make_adapter(base, adapters / "a", rank=4, targets=ALL_LINEAR, seed=0)
    alone = Engine(EngineConfig(model=str(base), num_pages=100))
    alone.load_adapter("a", str(path))
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = [output.text for output in alone.generate(["abc"] * 2, params, [None, "a"])]
    alone.close()
    flags = ["--model", "s3://models/tiny/base", "--adapter-source", str(adapters)]
    with (
        model_in_s3(base, tmp_path / "cache") as environment,
        serving([*flags, "--tensor-parallel-size", "2"], environment) as server,
    ):
        assert texts(server) == expected
        (rank,) = ranks_of(server)
        with ThreadPoolExecutor() as pool:
            running = pool.submit(server.complete, "base", max_tokens=480, ignore_eos=True)
            time.sleep(0.5)
            os.kill(rank, signal.SIGKILL)
            killed = time.monotonic()
            # it waits for the group that follows, as long as requests wait
            answer = running.result(timeout=60)
            assert answer.status == 503 or answer.body["usage"]["completion_tokens"] == 480, answer
        while server.complete("a").status != 200:
            assert time.monotonic() - killed < 90, "it is not replaced"
            time.sleep(0.5)
        assert texts(server) == expected
        assert ranks_of(server) != [rank]
    (cached,) = (tmp_path / "cache" / "models").iterdir()
    assert not list(cached.glob("*.safetensors"))


@contextmanager
def model_in_s3(base: Path, cache: Path) -> Iterator[dict[str, str]]:
    """Yields the variables that a server needs to read it."""
    with serve_moto() as endpoint:
        client = make_client(endpoint)
        client.create_bucket(Bucket="models")
        upload(client, base, "tiny/base")
        yield {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "LORAFLEET_CACHE": str(cache),
        }


def texts(server: ServeProcess) -> list[str]:
    answers = [server.complete(model) for model in ("base", "a")]
    assert [answer.status for answer in answers] == [200, 200], answers
    return [answer.body["choices"][0]["text"] for answer in answers]


def ranks_of(server: ServeProcess) -> list[int]:
    """Process ids; Ray's processes are no children of the server, but share its settings."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            if b"engine.tensor_parallel.worker" in command and str(server.ray_dir).encode() in environment:
                found.append(int(process.name))
    return found
