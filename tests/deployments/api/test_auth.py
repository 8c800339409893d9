"""API keys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deployments.api.auth import API_KEY_ENV, digest_key, load_api_keys
from tests.deployments.api.fake_fleet import BASE, FakeFleet

DIGESTS = (digest_key("first"), digest_key("second"))
ROUTES = [
    ("GET", "/v1/models"), ("GET", f"/v1/models/{BASE}"), ("GET", "/metrics"),
    ("GET", "/metrics/ingress"), ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nowhere"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"),
    ("POST", "/detokenize"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key(fleet: FakeFleet, method: str, path: str) -> None:
    async with fleet.client(api_key_digests=DIGESTS) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.anyio
async def test_health_needs_none(fleet: FakeFleet) -> None:
    async with fleet.client(api_key_digests=DIGESTS) as client:
        assert (await client.get("/health")).status_code == 200


@pytest.mark.anyio
async def test_a_key_need_not_be_ascii(fleet: FakeFleet) -> None:
    """Clients send UTF-8, whose last byte here is a blank to who takes it for Latin-1."""
    async with fleet.client(api_key_digests=(digest_key("voilà"),)) as client:
        headers = {b"authorization": "Bearer voilà".encode()}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("header", ["Bearer first", "Bearer second", "bearer  second "])
async def test_each_key_opens(fleet: FakeFleet, header: str) -> None:
    async with fleet.client(api_key_digests=DIGESTS) as client:
        answer = await client.get("/v1/models", headers={"authorization": header})
    assert answer.status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    "header", ["", "first", "Bearer", "Bearer third", "Basic first", "Bearer first,second"]
)
async def test_anything_else_does_not(
    fleet: FakeFleet, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with fleet.client(api_key_digests=DIGESTS) as client:
        answer = await client.get("/v1/models", headers={"authorization": header})
    assert answer.status_code == 401
    assert "third" not in caplog.text + answer.text


@pytest.mark.anyio
async def test_without_keys_all_is_open(fleet: FakeFleet) -> None:
    async with fleet.client() as client:
        assert (await client.get("/v1/models")).status_code == 200


def test_keys_come_from_all_three_places_as_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# staff\n\n b \nc\n")
    digests = load_api_keys(["a", "b"], file, {API_KEY_ENV: "d, a"})
    assert digests == tuple(map(digest_key, "abcd"))


def test_no_place_means_no_keys() -> None:
    assert load_api_keys([], None, {}) == ()


def test_place_without_a_key_is_an_error_and_not_an_open_server(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("# none yet\n")
    with pytest.raises(ValueError):
        load_api_keys([], empty, {})
    with pytest.raises(ValueError):
        load_api_keys([], None, {API_KEY_ENV: " , "})
    with pytest.raises(ValueError):
        load_api_keys([""], None, {})
