"""What Serve needs of the builder, without a cluster. The application itself is tried in tests/cluster."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.api import Application

from deployments.app import CONTROL_CALLS, build, engine_application
from deployments.config import AppArgs
from deployments.engine_replica import ENGINE_CLIENT, LOAD_CALLS
from router.catalog import MAX_UPKEEPS


def test_serve_run_can_pass_arguments_as_strings() -> None:
    """`serve run deployments.app:build model=... num_replicas=2`: Serve validates by the annotation."""
    application = call_user_app_builder_with_args_if_necessary(build, {"model": "m", "num_replicas": "2"})
    assert isinstance(application, Application)


@pytest.mark.parametrize(
    ("settings", "gpus", "bundles"),
    [
        ({}, 0, None),
        ({"device": "cuda"}, 4, None),
        ({"rank_placement": "PACK"}, 0, [{"CPU": 1}] * 4),
        ({"device": "cuda", "rank_placement": "PACK"}, 1, [{"CPU": 1, "GPU": 1}] * 4),
    ],
)
def test_a_replica_asks_for_the_gpus_of_its_ranks(
    settings: dict[str, Any], gpus: int, bundles: list[dict[str, int]] | None
) -> None:
    args = AppArgs(model="m", tensor_parallel_size=4, **settings)
    deployment = engine_application(args, None, ENGINE_CLIENT)._bound_deployment
    assert deployment.ray_actor_options["num_gpus"] == gpus
    assert deployment._replica_config.placement_group_bundles == bundles


def test_a_replica_full_of_requests_and_loads_has_places_for_other_calls() -> None:
    args = AppArgs(model="m", engine={"max_num_seqs": 4})
    deployment = engine_application(args, None, ENGINE_CLIENT)._bound_deployment
    assert deployment.max_ongoing_requests == 2 * 4 + LOAD_CALLS + CONTROL_CALLS
    assert MAX_UPKEEPS < LOAD_CALLS, "the catalog's own would fill them, and who loads one by hand is refused"


def test_the_catalog_does_not_import_torch() -> None:
    """Two seconds of each start."""
    code = "import sys, deployments.catalog_deployment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
