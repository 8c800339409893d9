"""What Serve needs of the builder, without a cluster. The application itself is tried in tests/cluster."""

from __future__ import annotations

import subprocess
import sys

from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.api import Application

from deployments.app import build


def test_serve_run_can_pass_arguments_as_strings() -> None:
    """`serve run deployments.app:build model=... num_replicas=2`: Serve validates by the annotation."""
    application = call_user_app_builder_with_args_if_necessary(build, {"model": "m", "num_replicas": "2"})
    assert isinstance(application, Application)


def test_the_catalog_does_not_import_torch() -> None:
    """Two seconds of each start."""
    code = "import sys, deployments.catalog_deployment; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
