"""`lorafleet serve --model s3://...`: every process of the fleet finds the model there."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.cluster.serve_process import serving
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload
from tests.tiny import make_llama

pytestmark = pytest.mark.cluster


def test_a_group_serves_a_model_from_s3(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    alone = Engine(EngineConfig(model=str(base), num_pages=100))
    (expected,) = alone.generate(["abc"], SamplingParams(temperature=0, max_tokens=8))
    alone.close()
    with serve_moto() as endpoint:
        client = make_client(endpoint)
        client.create_bucket(Bucket="models")
        upload(client, base, "tiny/base")
        environment = {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "LORAFLEET_CACHE": str(tmp_path / "cache"),
        }
        flags = ["--model", "s3://models/tiny/base", "--tensor-parallel-size", "2"]
        with serving(flags, environment) as server:
            answer = server.complete("base")
    assert answer.body["choices"][0]["text"] == expected.text
    (cached,) = (tmp_path / "cache" / "models").iterdir()
    assert not list(cached.glob("*.safetensors"))
