"""What Serve needs of the builder, without a cluster. The application itself is tried in tests/cluster."""

from __future__ import annotations

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.api import Application

from deployments.app import build


def test_serve_run_can_pass_arguments_as_strings() -> None:
    """`serve run deployments.app:build model=... num_replicas=2`: Serve validates by the annotation."""
    application = call_user_app_builder_with_args_if_necessary(build, {"model": "m", "num_replicas": "2"})
    assert isinstance(application, Application)
