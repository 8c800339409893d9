"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from deployments.api.adapters_route import allowed_uri
from engine.errors import AccessDenied, AdapterRefused, InvalidRequest, ModelNotFound, Unavailable
from tests.deployments.api.fake_fleet import BASE, FakeFleet

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


async def post(fleet: FakeFleet, path: str, body: dict[str, Any], enabled: bool = True) -> httpx2.Response:
    allowed = ("s3://bucket/adapters",)
    async with fleet.client(allow_runtime_loading=enabled, allowed_uri_prefixes=allowed) as client:
        return await client.post(path, json=body)


@pytest.mark.anyio
async def test_loaded_adapter_is_listed_and_unloaded_again(fleet: FakeFleet) -> None:
    """FR-47: its requests do not fall to the base model."""
    loaded = await post(fleet, LOAD, {"lora_name": "sql", "lora_path": "s3://bucket/adapters/sql/"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert fleet.catalog.records["sql"].ref.uri == "s3://bucket/adapters/sql"
    unloaded = await post(fleet, UNLOAD, {"lora_name": "sql", "lora_int_id": None})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    for stream in (False, True):
        retired = await post(fleet, "/v1/completions", {"model": "sql", "prompt": "hi", "stream": stream})
        assert (retired.status_code, retired.json()["error"]["code"]) == (404, "model_not_found")
    assert not fleet.service.requests
    again = await post(fleet, UNLOAD, {"lora_name": "sql"})
    assert (again.status_code, again.json()["error"]["message"]) == (
        404,
        "The lora adapter 'sql' cannot be found.",
    )


@pytest.mark.anyio
async def test_a_canary_is_for_a_name_that_is_there(fleet: FakeFleet) -> None:
    body = {"lora_name": "sql", "lora_path": "s3://bucket/adapters/v2", "canary_weight": 0.25}
    unknown = await post(fleet, LOAD, body)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_name")
    fleet.catalog.add("sql")
    assert (await post(fleet, LOAD, body)).status_code == 200
    canary = fleet.catalog.records["sql"].canary
    assert canary is not None
    assert (canary.record.ref.uri, canary.weight) == ("s3://bucket/adapters/v2", 0.25)
    assert (await post(fleet, LOAD, {**body, "canary_weight": 0})).status_code == 200
    assert fleet.catalog.records["sql"].canary is None
    for weight in (-0.1, 1, "0.5"):
        refused = await post(fleet, LOAD, {**body, "canary_weight": weight})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "canary_weight")


@pytest.mark.anyio
async def test_name_in_use_needs_load_inplace(fleet: FakeFleet) -> None:
    fleet.catalog.add("sql")
    body = {"lora_name": "sql", "lora_path": "s3://bucket/adapters/v2"}
    refused = await post(fleet, LOAD, body)
    assert refused.status_code == 409
    assert "load_inplace" in refused.json()["error"]["message"]
    assert (await post(fleet, LOAD, {**body, "load_inplace": True})).status_code == 200
    assert fleet.catalog.records["sql"].ref.uri == "s3://bucket/adapters/v2"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_path": "s3://bucket/adapters/a"}, 400, "lora_name"),
        ({"lora_name": "a"}, 400, "lora_path"),
        ({"lora_name": "", "lora_path": "s3://bucket/adapters/a"}, 400, "lora_name"),
        ({"lora_name": "../a", "lora_path": "s3://bucket/adapters/a"}, 400, "lora_name"),
        ({"lora_name": "a" * 129, "lora_path": "s3://bucket/adapters/a"}, 400, "lora_name"),
        ({"lora_name": BASE, "lora_path": "s3://bucket/adapters/a"}, 409, "lora_name"),
        ({"lora_name": "a", "lora_path": "s3://other/adapters/a"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "/a\0b"}, 400, "lora_path"),
    ],
)
async def test_bad_request_names_its_field(
    fleet: FakeFleet, body: dict[str, Any], status: int, param: str
) -> None:
    """FR-30."""
    answer = await post(fleet, LOAD, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert "/etc" not in answer.text
    assert not fleet.catalog.records


@pytest.mark.anyio
@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"])
@pytest.mark.parametrize("name", ["../x", "/etc", "%2e%2e/x", "a\0b", "a\nb"])
async def test_no_call_takes_a_name_outside_the_grammar(fleet: FakeFleet, path: str, name: str) -> None:
    """FR-30."""
    answer = await post(fleet, path, {"lora_name": name, "lora_path": "s3://bucket/adapters/a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
    assert name not in answer.text
    assert not fleet.catalog.records


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (AdapterRefused("DoRA", param="use_dora"), 400),
        (ModelNotFound("s3://bucket/adapters/a"), 404),
        (AccessDenied("access denied"), 502),
        (Unavailable("slow", retry_after_s=3), 503),
    ],
)
async def test_failed_load_keeps_its_cause(fleet: FakeFleet, failure: Exception, status: int) -> None:
    """FR-64."""
    fleet.catalog.failure = failure
    answer = await post(fleet, LOAD, {"lora_name": "a", "lora_path": "s3://bucket/adapters/a"})
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status == 503)
    if status == 400:
        assert answer.json()["error"]["param"] == "use_dora"


@pytest.mark.anyio
@pytest.mark.parametrize("path", [LOAD, UNLOAD])
async def test_runtime_loading_is_off_unless_enabled(fleet: FakeFleet, path: str) -> None:
    answer = await post(fleet, path, {"lora_name": "a", "lora_path": "s3://bucket/adapters/a"}, enabled=False)
    assert answer.status_code == 403
    assert "enabled" in answer.json()["error"]["message"]
    assert not fleet.catalog.records


def test_link_out_of_the_allowed_directory_is_refused(tmp_path: Path) -> None:
    """FR-30."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "a").mkdir(parents=True)
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    allowed = (str(inside),)
    assert allowed_uri(f"{inside}/a/", allowed) == str((inside / "a").resolve())
    for path in (inside / "link", inside / ".." / "out", tmp_path / "in2", outside):
        with pytest.raises(InvalidRequest) as refused:
            allowed_uri(str(path), allowed)
        assert refused.value.param == "lora_path"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/adapters2/a",
        "s3://bucket",
        "s3://bucket/adapters/../x",
        "s3://bucket/adapters//x",
        "bucket",
        "/a\ud800b",
    ],
)
def test_key_outside_the_allowed_prefix_is_refused(uri: str) -> None:
    """FR-30."""
    with pytest.raises(InvalidRequest):
        allowed_uri(uri, ("s3://bucket/adapters/",))


def test_without_prefixes_nothing_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        allowed_uri(str(tmp_path), ())


@pytest.mark.anyio
async def test_an_adapter_is_pinned_and_unpinned(fleet: FakeFleet) -> None:
    fleet.service.known.add("sql")
    pinned = await post(fleet, "/v1/pin_lora_adapter", {"lora_name": "sql"})
    assert (pinned.status_code, pinned.text) == (200, "Success: LoRA adapter 'sql' pinned.")
    assert fleet.service.pinned == {"sql"}
    unpinned = await post(fleet, "/v1/unpin_lora_adapter", {"lora_name": "sql"})
    assert (unpinned.status_code, unpinned.text) == (200, "Success: LoRA adapter 'sql' unpinned.")
    assert fleet.service.pinned == set()
    for path in ("/v1/pin_lora_adapter", "/v1/unpin_lora_adapter"):
        unknown = await post(fleet, path, {"lora_name": "other"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "lora_name")
        assert (await post(fleet, path, {"lora_name": "sql"}, enabled=False)).status_code == 403
