"""The Serve config inside each RayService: Ray's schema, our own arguments, and that the two fit the pods."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import ray.serve._private.constants as serve_constants
from opentelemetry.sdk import environment_variables
from ray.serve.schema import ServeDeploySchema

from deployments import tracing
from deployments.config import AppArgs
from deployments.tracing import ENDPOINTS
from tests.k8s.manifests import (
    ROOT,
    SCENARIOS,
    app_args,
    cluster,
    serve_config,
    worker_group,
)

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)
# read by Ray, by huggingface_hub, by Triton, by OpenTelemetry, and by us
OTHERS_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED", "HF_HOME", "HF_TOKEN", "TRITON_CACHE_DIR", "LORAFLEET_CACHE",
    environment_variables.OTEL_TRACES_SAMPLER, environment_variables.OTEL_TRACES_SAMPLER_ARG, *ENDPOINTS,
}  # fmt: skip


@each_scenario
def test_serve_and_we_accept_it(scenario: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_config(scenario))
    (application,) = schema.applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    AppArgs(**app_args(scenario))


@each_scenario
def test_pods_are_as_large_as_the_replica_in_them(scenario: str) -> None:
    """`numOfHosts` pods are one replica, where its ranks are actors."""
    args, group = AppArgs(**app_args(scenario)), worker_group(scenario)
    (ray,) = group["template"]["spec"]["containers"]
    limits = ray["resources"]["limits"]
    assert limits == ray["resources"]["requests"]
    hosts = group["numOfHosts"]
    assert hosts == 1 or args.has_rank_actors
    gpus = args.tensor_parallel_size if args.device == "cuda" else 0
    assert hosts * int(limits.get("nvidia.com/gpu", 0)) == gpus
    assert group["replicas"] == args.num_replicas
    # each rank keeps its part of what the first one keeps
    host_cache = args.engine_config().host_cache_bytes * args.tensor_parallel_size / hosts
    assert host_cache < (int(limits["memory"].removesuffix("Gi")) << 30) / 2


@each_scenario
def test_ports_agree(scenario: str) -> None:
    (ray,) = worker_group(scenario)["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in ray["ports"]}
    assert ports["lorafleet"] == app_args(scenario)["metrics_port"]
    assert ports["serve"] == serve_config(scenario)["http_options"]["port"]


@each_scenario
def test_serve_scales_within_what_the_cluster_can_have(scenario: str) -> None:
    (application,) = serve_config(scenario)["applications"]
    assert "deployments" not in application, "it would win over the arguments"
    scaling = AppArgs(**app_args(scenario)).autoscaling
    if not cluster(scenario).get("enableInTreeAutoscaling"):
        assert scaling is None
        return
    group = worker_group(scenario)
    assert scaling is not None
    assert (scaling.min_replicas, scaling.max_replicas) == (group["minReplicas"], group["maxReplicas"])


@each_scenario
def test_overlays_repeat_the_base_but_for_what_they_are_for(scenario: str) -> None:
    """The config is one string, so an overlay that changes a word holds all of it."""
    config, base = serve_config(scenario), serve_config("base")
    assert {k: v for k, v in config.items() if k != "applications"} == {
        k: v for k, v in base.items() if k != "applications"
    }
    args, expected = app_args(scenario), app_args("base")
    assert args.get("metrics_port") == expected["metrics_port"]
    assert args["graceful_shutdown_timeout_s"] == expected["graceful_shutdown_timeout_s"]
    if not scenario.endswith(("tp2", "tp8", "multi-host", "cpu")):
        assert {k: v for k, v in args.items() if k != "autoscaling"} == expected


@each_scenario
def test_environment_names_are_ones_that_somebody_reads(scenario: str) -> None:
    known = Path(serve_constants.__file__).read_text()
    head = cluster(scenario)["headGroupSpec"]["template"]["spec"]["containers"][0]
    worker = worker_group(scenario)["template"]["spec"]["containers"][0]
    assert head["env"] == worker["env"], "Serve's controller and replicas must see the same"
    for variable in head["env"]:
        name = variable["name"]
        assert name in OTHERS_ENVIRONMENT or f'"{name}"' in known, name


def test_the_cpu_overlays_adapters_are_in_the_image() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    source, target = next(
        line.split()[-2:] for line in text.splitlines() if line.startswith("COPY") and "demo-adapters" in line
    )
    for uri in app_args("overlays/cpu")["lora_modules"].values():
        folder, _, name = uri.rpartition("/")
        assert folder == f"/opt/lorafleet/{target}"
        assert (ROOT / source / name / "adapter_config.json").exists()


def test_the_tracing_overlay_turns_tracing_on() -> None:
    for scenario in ("base", "overlays/tracing"):
        (ray,) = worker_group(scenario)["template"]["spec"]["containers"]
        environment = {variable["name"]: variable.get("value", "") for variable in ray["env"]}
        assert tracing.is_configured(environment) == (scenario != "base")


def test_the_image_can_trace() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert text.count("./src[otel]") == text.count("pip install") - 2, "both targets, but for torch"
