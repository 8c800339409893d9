"""Fixtures of the HTTP layer's tests. Async tests run on asyncio through anyio's plugin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployments.api.fake_fleet import FakeFleet


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fake = FakeFleet()
    yield fake
    assert fake.service.num_running == 0, "a request was not closed"
