from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.adapters import s3
from engine.adapters.loader import AdapterLoader, LoadResult
from engine.adapters.reader import MIN_CHUNK_BYTES
from engine.adapters.s3 import S3Source
from engine.adapters.source import describe, open_reader, open_source, read_adapter_files
from engine.config import EngineConfig
from engine.errors import (
    AccessDenied,
    AdapterRefused,
    InvalidRequest,
    LorafleetError,
    ModelNotFound,
    Unavailable,
)
from engine.request import AdapterRef
from tests.engine.adapters.adapter_dirs import (
    BASE_T,
    FORMAT,
    load,
    lora_tensors,
    tensor_name,
    unpack,
    write_adapter,
)
from tests.engine.adapters.fake_s3 import FakeS3, serve
from tests.engine.adapters.faults import FaultKind

SECRET = "top-secret-key"
URI = "s3://models/adapters/sql"
WEIGHTS = "adapters/sql/adapter_model.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeS3, str]]:
    fake = FakeS3()
    with serve(fake) as endpoint:
        yield fake, endpoint


@pytest.fixture
def fake(server: tuple[FakeS3, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    fake, endpoint = server
    fake.reset()
    for name in ("sql", "b"):
        path = write_adapter(tmp_path / name)
        for file in path.iterdir():
            fake.objects[f"adapters/{name}/{file.name}"] = file.read_bytes()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "some-key-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    # retries are tested, not how long they wait
    monkeypatch.setattr(s3, "RESUME_DELAY_S", 0.0)
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    return fake


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.2)


def assert_loads(uri: str = URI) -> None:
    image = load(uri)
    for name, tensor in lora_tensors().items():
        *_, layer, _, projection, side, _ = name.split(".")
        assert torch.equal(unpack(image, BASE_T, int(layer), projection)[side[-1]], tensor)


def assert_tells_nothing(error: LorafleetError) -> None:
    """FR-64."""
    text = repr(error.body())
    for secret in (SECRET, "some-key-id", "X-Amz", "http://", "127.0.0.1", "secret detail", "adapters/"):
        assert secret not in text
    assert error.__cause__ is None


def test_each_folder_under_the_prefix_is_an_adapter(fake: FakeS3) -> None:
    fake.objects["adapters/not-one/file"] = b""
    fake.objects["adapters/bad name/adapter_config.json"] = b""
    fake.objects["adapters/nested/deeper/adapter_config.json"] = b""
    fake.objects["adapters-of-others/c/adapter_config.json"] = b""
    fake.objects["adapters/adapter_config.json"] = b""
    listings = open_source("s3://models/adapters/").list_adapters()
    assert [listing.name for listing in listings] == ["b", "sql"]
    assert listings[1] == open_source("s3://models/adapters").find("sql") == describe(URI)
    assert listings[1].uri == URI
    assert fake.keys_got == []


def test_a_listing_of_many_pages_is_whole(fake: FakeS3) -> None:
    for index in range(40):
        fake.objects[f"adapters/n{index:02}/adapter_config.json"] = b"{}"
    fake.page_size = 7
    assert len(open_source("s3://models/adapters").list_adapters()) == 42
    for index in range(20):
        fake.objects[f"adapters/sql/a{index}.bin"] = b""
    assert [file.name for file in describe(URI).files] == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_listing_of_too_many_keys_ends_and_says_where(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MAX_SOURCE_KEYS", 20)
    fake.page_size = 5
    source = S3Source("s3://models/adapters")
    fake.objects |= {f"adapters/sql/checkpoint-1/{index}": b"" for index in range(20 - len(fake.objects))}
    assert len(source.list_adapters()) == 2
    fake.objects |= {f"adapters/logs/{index}": b"" for index in range(1000)}
    fake.requests.clear()
    with pytest.raises(InvalidRequest, match="s3://models/adapters/ holds more than 20 keys"):
        source.list_adapters()
    assert len(fake.requests) == 4
    assert source.find("sql").name == "sql"


@pytest.mark.parametrize("key", ["adapters/sql/{}", "adapters/sql/{}/file"])
def test_a_folder_of_too_many_keys_is_no_adapter(
    key: str, fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "MAX_FOLDER_KEYS", 10)
    fake.page_size = 5
    fake.objects |= {key.format(index): b"" for index in range(100)}
    with pytest.raises(InvalidRequest, match="s3://models/adapters/sql/ holds more than 10 keys"):
        describe(URI)
    assert len(fake.requests) == 2


def test_an_adapter_is_loaded_from_s3(fake: FakeS3) -> None:
    assert_loads()
    assert sorted(fake.keys_got) == ["adapters/sql/adapter_config.json", WEIGHTS]


def test_only_the_needed_files_are_downloaded(fake: FakeS3) -> None:
    """FR-18."""
    for name in ("optimizer.pt", "training_args.bin", "README.md", "adapter_model.bin", "checkpoint-1/x"):
        fake.objects[f"adapters/sql/{name}"] = b"x"
    fake.objects["adapters/sql/tokenizer_config.json"] = b"{}"
    assert_loads()
    assert sorted(fake.keys_got) == [
        "adapters/sql/adapter_config.json",
        WEIGHTS,
        "adapters/sql/tokenizer_config.json",
    ]


def test_a_bucket_without_a_prefix_is_a_source(fake: FakeS3) -> None:
    for key in list(fake.objects):
        fake.objects[key.removeprefix("adapters/")] = fake.objects.pop(key)
    assert [listing.uri for listing in S3Source("s3://models").list_adapters()] == [
        "s3://models/b",
        "s3://models/sql",
    ]
    assert_loads("s3://models/sql")


def test_a_new_object_is_a_new_version(fake: FakeS3) -> None:
    before = describe(URI).version
    assert describe(URI).version == before
    fake.objects[WEIGHTS] += b"x"
    assert describe(URI).version != before


def test_a_listing_without_a_way_to_its_rest_is_a_503(fake: FakeS3) -> None:
    """As of servers that page as the first version of the call does."""
    fake.page_size = 1
    fake.tells_tokens = False
    with pytest.raises(Unavailable):
        describe(URI)


@pytest.mark.parametrize("keep", [0, 50])
def test_a_listing_that_breaks_off_is_not_taken_for_an_empty_one(keep: int, fake: FakeS3) -> None:
    """FR-64: a 404 would be believed."""
    fake.fail("cut", "list", times=2, keep=keep)
    assert_loads()
    fake.fail("cut", "list", keep=keep)
    for call in (lambda: describe(URI), S3Source("s3://models/adapters").list_adapters):
        with pytest.raises(Unavailable) as caught:
            call()
        assert_tells_nothing(caught.value)


@pytest.mark.parametrize("name", ["../b", "..", "b/../sql", "/etc", "a\n", ""])
def test_no_name_reaches_a_key_outside_the_prefix(name: str, fake: FakeS3) -> None:
    """FR-30."""
    with pytest.raises(InvalidRequest):
        S3Source("s3://models/adapters/b").find(name)
    assert fake.requests == []


def test_a_name_of_several_parts_is_no_folder_of_the_source(fake: FakeS3) -> None:
    """FR-30."""
    with pytest.raises(ModelNotFound):
        S3Source("s3://models/adapters/b").find("sql/adapter_config.json")
    assert fake.requests == []


@pytest.mark.parametrize(
    "uri",
    ["s3://", "s3:///a", "s3://no bucket/a", "s3://models/a/../b", "s3://models/a//b", "s3://models/./a"],
)
@pytest.mark.usefixtures("fake")
def test_a_malformed_uri_is_a_400(uri: str) -> None:
    with pytest.raises(InvalidRequest):
        describe(uri)


def test_a_large_file_is_read_in_parallel_ranges(fake: FakeS3) -> None:
    content = bytes(range(256)) * (3 * MIN_CHUNK_BYTES // 256) + b"end"
    fake.objects[WEIGHTS] = content
    reader = open_reader(describe(URI))
    with reader.start_read("adapter_model.safetensors") as read:
        read.wait(len(content))
        assert read.buffer == content
    assert fake.keys_got.count(WEIGHTS) == 4


@pytest.mark.parametrize("keep", [0, 1, 5000])
def test_a_body_that_is_cut_is_resumed(keep: int, fake: FakeS3) -> None:
    """FR-63."""
    fake.fail("cut", WEIGHTS, times=2, keep=keep)
    assert_loads()
    assert fake.keys_got.count(WEIGHTS) == 3


@pytest.mark.usefixtures("impatient")
def test_a_body_that_stalls_is_resumed(fake: FakeS3) -> None:
    """FR-64."""
    fake.fail("stall", WEIGHTS, times=2, keep=5000, seconds=1.0)
    assert_loads()
    assert fake.keys_got.count(WEIGHTS) >= 3


def test_a_body_that_always_breaks_off_is_given_up(fake: FakeS3) -> None:
    """FR-64."""
    fake.fail("cut", WEIGHTS, keep=10)
    with pytest.raises(Unavailable) as caught:
        load(URI)
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    assert fake.keys_got.count(WEIGHTS) == s3.MAX_RESUMES + 1
    assert_tells_nothing(caught.value)


def test_a_server_that_ignores_ranges_is_not_believed(fake: FakeS3) -> None:
    fake.objects[WEIGHTS] += bytes(2 << 20)
    fake.fail("whole", WEIGHTS)
    with pytest.raises(Unavailable):
        load(URI)


def test_a_server_that_answers_with_another_range_is_not_believed(fake: FakeS3) -> None:
    weights = fake.objects[WEIGHTS]
    fake.fail("cut", WEIGHTS, times=1, keep=len(weights) // 2)
    fake.fail("start", WEIGHTS)
    with pytest.raises(Unavailable):
        load(URI)


def test_a_slow_down_is_retried(fake: FakeS3) -> None:
    """FR-64."""
    fake.fail("status", WEIGHTS, times=2)
    assert_loads()


def test_a_lasting_slow_down_is_a_503_after_bounded_tries(fake: FakeS3) -> None:
    """FR-64."""
    fake.fail("status", WEIGHTS)
    with pytest.raises(Unavailable) as caught:
        load(URI)
    assert "SlowDown" in caught.value.message
    assert caught.value.retry_after_s is not None
    assert_tells_nothing(caught.value)
    (fault,) = fake.planned
    assert (1 << 30) - fault.times == 3


@pytest.mark.parametrize("match", ["list", WEIGHTS])
@pytest.mark.parametrize(
    ("status", "code"),
    [(403, "AccessDenied"), (400, "ExpiredToken"), (301, "PermanentRedirect"), (401, "Unauthorized")],
)
def test_a_refusal_of_our_credentials_says_so_and_is_not_retried(
    status: int, code: str, match: str, fake: FakeS3
) -> None:
    """FR-64."""
    fake.fail("status", match, status=status, code=code)
    with pytest.raises(AccessDenied) as caught:
        load(URI)
    assert caught.value.status == 502
    assert "access denied" in caught.value.message
    assert code in caught.value.message
    assert_tells_nothing(caught.value)
    (fault,) = fake.planned
    assert (1 << 30) - fault.times <= 2  # a redirect is asked for the right region once


def test_what_is_not_there_is_a_404(fake: FakeS3) -> None:
    """FR-26, FR-64."""
    fake.fail("status", WEIGHTS, status=404, code="NoSuchKey")
    for uri in (URI, "s3://models/adapters/absent", "s3://other-bucket/sql"):
        with pytest.raises(ModelNotFound) as caught:
            load(uri)
        assert caught.value.status == 404
        assert_tells_nothing(caught.value)
    with pytest.raises(ModelNotFound):
        S3Source("s3://models/adapters").find("absent")


@pytest.mark.usefixtures("impatient")
def test_a_server_that_does_not_answer_is_a_503(fake: FakeS3) -> None:
    """FR-64."""
    fake.fail("late", WEIGHTS, seconds=2.0)
    with pytest.raises(Unavailable) as caught:
        load(URI)
    assert_tells_nothing(caught.value)


def test_a_refused_connection_is_a_503(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-64."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    with pytest.raises(Unavailable) as caught:
        describe(URI)
    assert_tells_nothing(caught.value)


def test_missing_credentials_are_named(fake: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FR-64."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(s3, "CONNECT_TIMEOUT_S", 0.9)  # another client
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "absent"))
    with pytest.raises(AccessDenied) as caught:
        describe(URI)
    assert "credentials" in caught.value.message
    assert fake.requests == []


def test_an_object_that_is_replaced_in_mid_download_is_read_from_the_top(
    fake: FakeS3, tmp_path: Path
) -> None:
    """FR-22, FR-63: bytes of two versions are never mixed."""
    new = {name: tensor * 2 for name, tensor in lora_tensors().items()}
    content = (write_adapter(tmp_path / "new", new) / "adapter_model.safetensors").read_bytes()
    fake.fail("cut", WEIGHTS, times=1, keep=100)
    fake.fail("change", WEIGHTS, times=1, content=content)
    image = load(URI)
    name = tensor_name(1, "v_proj", "B")
    assert torch.equal(unpack(image, BASE_T, 1, "v_proj")["B"], new[name])
    assert fake.keys_got.count(WEIGHTS) == 3


@pytest.mark.parametrize("size", [None, 50])
def test_a_server_that_ignores_conditions_mixes_no_versions(
    size: int | None, fake: FakeS3, tmp_path: Path
) -> None:
    """FR-22, FR-63: also where the new object is shorter than what was read of the old one."""
    new = {name: tensor * 2 for name, tensor in lora_tensors().items()}
    path = write_adapter(tmp_path / "new", new)
    content = (path / "adapter_model.safetensors").read_bytes()
    fake.knows_conditions = False
    fake.fail("cut", WEIGHTS, times=1, keep=len(content) - 100)
    fake.fail("change", WEIGHTS, times=1, content=content[:size])
    if size is None:
        assert load(URI).digest == load(str(path)).digest
    else:
        with pytest.raises(AdapterRefused):
            load(URI)


def test_an_object_that_keeps_changing_is_a_503(fake: FakeS3) -> None:
    """FR-22."""
    for index in range(10):
        fake.fail("change", WEIGHTS, times=1, content=b"x" * (100 + index))
    with pytest.raises(Unavailable) as caught:
        load(URI)
    assert caught.value.retry_after_s is not None
    assert fake.keys_got.count(WEIGHTS) == 2


def test_a_read_that_is_not_wanted_any_more_ends(fake: FakeS3) -> None:
    class Unwanted(Exception):
        pass

    def check() -> None:
        if fake.keys_got:
            raise Unwanted

    with pytest.raises(Unwanted):
        read_adapter_files(open_reader(describe(URI), check))
    assert len(fake.keys_got) <= 2  # the first reads are made at once


@pytest.mark.parametrize("fault", [None, "status", "cut", "late"])
@pytest.mark.usefixtures("impatient")
def test_no_log_tells_credentials_or_signatures(
    fault: FaultKind | None, fake: FakeS3, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-64: also not when everything is logged."""
    caplog.set_level(logging.DEBUG)
    if fault:
        fake.fail(fault, WEIGHTS, status=403, seconds=1.0)
        with pytest.raises(LorafleetError):
            load(URI)
    else:
        load(URI)
    assert any(record.name.startswith("urllib3") for record in caplog.records)  # so everything was
    for secret in (SECRET, "some-key-id", "Signature", "Authorization"):
        assert secret not in caplog.text


def test_a_source_that_is_late_delays_no_other(fake: FakeS3) -> None:
    """FR-34."""
    fake.fail("late", WEIGHTS, seconds=2.0)
    results: queue.Queue[LoadResult] = queue.Queue()
    loader = AdapterLoader(FORMAT, EngineConfig(model="unused", max_parallel_loads=1), results.put)
    for name in ("sql", "b"):
        loader.submit(AdapterRef(name, f"s3://models/adapters/{name}", "1"))
    result = results.get(timeout=10.0)
    assert result.ref.name == "b"
    assert result.image is not None
    loader.close()
    assert not any(thread.name.startswith("adapter-") for thread in threading.enumerate())


def test_connections_are_used_again(fake: FakeS3) -> None:
    load(URI)
    before = fake.num_connections
    for _ in range(5):
        load(URI)
    assert fake.num_connections == before
