"""What was loaded at run time, in a file and in a bucket, with several catalogs writing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.demo.s3 import EmbeddedS3
from engine.adapters.files import SourceChanged
from engine.adapters.source import open_source
from engine.errors import AccessDenied, ModelNotFound, Unavailable
from router import catalog_state
from router.catalog_state import CatalogState, Desired, Store
from router.catalog_store import FileStore, open_store


@pytest.fixture
def file(tmp_path: Path) -> Store:
    return FileStore(tmp_path / "state" / "catalog.json")


@pytest.fixture(scope="module")
def s3() -> Iterator[EmbeddedS3]:
    with EmbeddedS3() as server:
        server.client().create_bucket(Bucket="models")
        yield server


@pytest.fixture
def bucket(s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Store:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://models/{request.node.name.partition('[')[0]}", None)
    assert store is not None
    return store


STORES = pytest.mark.parametrize("kind", ["file", pytest.param("bucket", marks=pytest.mark.cluster)])


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(kind)
    return found


async def add(state: CatalogState, name: str) -> None:
    await state.change(lambda desired: desired.with_loaded(name, f"src/{name}"))


@STORES
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


@STORES
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


@pytest.mark.cluster
def test_the_bucket_of_the_source_is_used_without_being_told(bucket: Store, s3: EmbeddedS3) -> None:
    prefix = "test_the_bucket_of_the_source_is_used_without_being_told"
    bucket.write(b"{}", None)
    keys = s3.client().list_objects_v2(Bucket="models", Prefix=prefix)["Contents"]
    assert [entry["Key"] for entry in keys] == [f"{prefix}/.lorafleet/catalog.json"]
    assert open_source(f"s3://models/{prefix}").list_adapters() == []


@pytest.mark.cluster
@pytest.mark.usefixtures("bucket")
def test_a_missing_bucket_is_told() -> None:
    store = open_store("s3://absent/prefix", None)
    assert store is not None
    with pytest.raises(ModelNotFound):
        store.read()


def test_a_file_wins_and_a_directory_keeps_nothing(tmp_path: Path) -> None:
    assert isinstance(open_store("s3://b/p", tmp_path / "f"), FileStore)
    assert open_store(str(tmp_path), None) is None
    assert open_store(None, None) is None


def test_without_a_store_it_is_kept_in_memory() -> None:
    async def main() -> None:
        state = CatalogState(None)
        await add(state, "x")
        await state.refresh()
        assert state.desired == Desired({"x": "src/x"})

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "[]", '{"loaded": 3, "removed": []}', '{"loaded": {}}', "not json"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "catalog.json"
    path.write_text(text)

    async def main() -> None:
        state = CatalogState(FileStore(path))
        with pytest.raises(ValueError, match="holds something else"):
            await state.refresh()
        with pytest.raises(ValueError, match="holds something else"):
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
    with pytest.raises(Unavailable):
        FileStore(tmp_path / "file" / "catalog.json").write(b"", None)


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
