"""The same reads against moto's S3 server, which answers as S3 does and was not written for these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engine.adapters.files import SourceChanged
from engine.adapters.reader import MAX_CHUNK_BYTES
from engine.adapters.source import describe, open_reader, open_source
from engine.errors import ModelNotFound
from tests.engine.adapters.adapter_dirs import BASE_T, load, lora_tensors, tensor_name, unpack, write_adapter
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

pytestmark = pytest.mark.cluster


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Client]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with serve_moto() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        client = make_client(endpoint)
        client.create_bucket(Bucket="models")
        yield client
        client.close()


def test_adapters_are_listed_found_and_loaded(client: S3Client, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", files={"optimizer.pt": "x", "chat_template.jinja": "{{ messages }}"})
    for name in ("one", "two"):
        upload(client, path, f"tenants/{name}")
    upload(client, path, "tenants-2/three")
    source = open_source("s3://models/tenants")
    assert [listing.uri for listing in source.list_adapters()] == [
        "s3://models/tenants/one",
        "s3://models/tenants/two",
    ]
    image = load(source.find("two").uri)
    want = lora_tensors()[tensor_name(1, "v_proj", "B")]
    assert torch.equal(unpack(image, BASE_T, 1, "v_proj")["B"], want)
    assert image.chat_template == "{{ messages }}"
    for uri in ("s3://models/tenants/absent", "s3://absent/one"):
        with pytest.raises(ModelNotFound):
            describe(uri)


def test_a_multipart_object_is_read_in_ranges_of_one_version(client: S3Client, tmp_path: Path) -> None:
    content = bytes(range(256)) * (2 * MAX_CHUNK_BYTES // 256) + b"end"
    (tmp_path / "w").write_bytes(content)
    client.put_object(Bucket="models", Key="big/adapter_config.json", Body=b"{}")
    client.upload_file(str(tmp_path / "w"), "models", "big/adapter_model.safetensors")
    listing = describe("s3://models/big")
    with open_reader(listing).start_read("adapter_model.safetensors") as read:
        read.wait(len(content))
        assert read.buffer == content
    client.put_object(Bucket="models", Key="big/adapter_model.safetensors", Body=content)
    with pytest.raises(SourceChanged), open_reader(listing).start_read("adapter_model.safetensors") as read:
        read.wait(len(content))
