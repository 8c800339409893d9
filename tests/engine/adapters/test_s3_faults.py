"""FR-64 as a sweep: every fault at every request of a load, once and for ever, between boto3 and moto."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from engine.adapters import reader, s3
from engine.adapters.image import AdapterImage
from engine.errors import AccessDenied, AdapterRefused, LorafleetError, ModelNotFound, Unavailable
from engine.shape import PROJECTIONS
from tests.engine.adapters import fault_proxy
from tests.engine.adapters.adapter_dirs import all_elements, load, lora_tensors, write_adapter, write_sums
from tests.engine.adapters.faults import FaultKind, Faults
from tests.engine.adapters.s3_servers import make_client, serve_moto, upload

pytestmark = pytest.mark.cluster

URI = "s3://models/adapters/sql"
READ_TIMEOUT_S = 0.2
PLACES = {
    "list": "list-type=2",
    "config": "adapter_config.json",
    "sums": "SHA256SUMS",
    "head": "safetensors bytes=0-",
    "first range": "safetensors bytes=1048576-",
    "last range": "safetensors bytes=2097152-",
}


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("adapters") / "sql"
    tensors = lora_tensors(rank=256, projections=PROJECTIONS)
    write_adapter(path, tensors, {"peft_type": "LORA", "r": 256})
    write_sums(path)
    assert (path / "adapter_model.safetensors").stat().st_size > 2097152
    with serve_moto() as endpoint:
        client = make_client(endpoint)
        client.create_bucket(Bucket="models")
        upload(client, path, "adapters/sql")
        yield endpoint


@pytest.fixture(scope="module")
def server(moto: str) -> Iterator[tuple[Faults, str]]:
    proxy = Faults()
    with fault_proxy.serve(proxy, moto) as endpoint:
        yield proxy, endpoint


@pytest.fixture
def proxy(server: tuple[Faults, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    proxy, endpoint = server
    proxy.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(reader, "MIN_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", READ_TIMEOUT_S)
    monkeypatch.setattr(s3, "RESUME_DELAY_S", 0.0)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    yield proxy
    assert [t.name for t in threading.enumerate() if t.name.startswith("adapter-")] == []


@pytest.fixture(scope="module")
def want(moto: str) -> AdapterImage:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", moto)
        patch.setenv("AWS_ACCESS_KEY_ID", "id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        return load(URI)


def assert_loads(want: AdapterImage) -> None:
    got = load(URI)
    assert got.digest == want.digest
    assert torch.equal(all_elements(got), all_elements(want))


ONCE: list[tuple[FaultKind, int]] = [
    ("status", 0), ("late", 0), ("slow", 0), ("cut", 0), ("cut", 100), ("reset", 0), ("reset", 100),
    ("stall", 100), ("flip", 0), ("flip", 100),
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("kind", "keep"), ONCE)
def test_one_fault_is_overcome(
    kind: FaultKind, keep: int, place: str, proxy: Faults, want: AdapterImage
) -> None:
    proxy.fail(kind, PLACES[place], times=1, keep=keep, seconds=2 * READ_TIMEOUT_S)
    # a listing may say something else that is well formed; wrong bytes are not served for that
    with suppress(*((LorafleetError,) if (place, kind) == ("list", "flip") else ())):
        assert_loads(want)
    assert proxy.num_met == 1


ALWAYS: list[tuple[FaultKind, int, type[LorafleetError]]] = [
    ("status", 403, AccessDenied),
    ("status", 404, ModelNotFound),
    ("status", 503, Unavailable),
    ("late", 0, Unavailable),
    ("cut", 0, Unavailable),
    ("reset", 0, Unavailable),
    ("stall", 0, Unavailable),
]


@pytest.mark.parametrize("place", ["list", "config", "head", "last range"])
@pytest.mark.parametrize(("kind", "status", "error"), ALWAYS)
def test_a_lasting_fault_is_given_up_after_bounded_tries(
    kind: FaultKind, status: int, error: type[LorafleetError], place: str, proxy: Faults, want: AdapterImage
) -> None:
    proxy.fail(kind, PLACES[place], status=status, code="Fault", seconds=2 * READ_TIMEOUT_S)
    with pytest.raises(error) as caught:
        load(URI)
    assert type(caught.value) is error
    assert (caught.value.retry_after_s is not None) == (error is Unavailable)
    assert proxy.num_met <= (3 * (s3.MAX_RESUMES + 1) if error is Unavailable else 1)
    assert "127.0.0.1" not in caught.value.message
    assert "secret" not in caught.value.message
    proxy.reset()
    assert_loads(want)


@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("list", "sums")])
def test_bytes_that_are_always_wrong_are_refused_by_their_digest(place: str, proxy: Faults) -> None:
    """Not by what they mean: a wrong bit in a weight looks like any other weight."""
    proxy.fail("flip", PLACES[place], keep=1 << 30)
    with pytest.raises(AdapterRefused) as caught:
        load(URI)
    assert "SHA-256" in caught.value.message
    assert proxy.num_met == 2


def num_files() -> int:
    gc.collect()  # each load here has an arena of its own, which frames of its exception may still name
    return len(os.listdir("/proc/self/fd"))


def test_nothing_of_failed_loads_is_left(proxy: Faults) -> None:
    proxy.fail("cut", PLACES["last range"])
    for _ in range(2):
        with pytest.raises(Unavailable):
            load(URI)
    files = num_files()
    for _ in range(5):
        with pytest.raises(Unavailable):
            load(URI)
    assert num_files() <= files + 8  # connections come and go
