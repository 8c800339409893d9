"""An ingress before it serves. The rest of it needs Serve: see `tests/cluster`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments import ingress


class Handle:
    """Of engines that fail so, then answer."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def options(self, **options: Any) -> Handle:
        return self

    async def remote(self) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop(0)
        return {"max_model_len": 256}


def test_it_waits_for_an_engine_for_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router waits for seconds, weights may take minutes, and Serve counts failed constructors."""
    monkeypatch.setattr(ingress, "LOOK_AGAIN_S", 0.0)
    none = DeploymentUnavailableError(DeploymentID("engine"))
    engine = Handle(*[none] * 30, BackPressureError(1, 1), RayActorError())
    assert asyncio.run(ingress._facts(engine)) == {"max_model_len": 256}
