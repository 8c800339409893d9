"""Every object against the schema of its kind."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.k8s.crd_schema import strict_schema
from tests.k8s.manifests import OVERLAYS, ROOT, SCENARIOS, build, of_kind, pod_templates, ray_service

KUBERNETES = "1.37"
CRDS = Path(os.environ.get("KUBERAY_CRDS", ROOT.parent / "shared" / "k8s-crds"))
NAMESPACE = "lorafleet"
OTHER_CRDS = {  # as their projects name the files
    "Gateway": "gateway.networking.k8s.io_gateways.yaml",
    "HTTPRoute": "gateway.networking.k8s.io_httproutes.yaml",
    "InferencePool": "inference.networking.k8s.io_inferencepools.yaml",
    "PodMonitor": "monitoring.coreos.com_podmonitors.yaml",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.yaml",
}


def validator_of(file: str) -> Any:
    path = CRDS / file
    if not path.exists():
        pytest.skip(f"no {file} in {CRDS}: set KUBERAY_CRDS to a folder with it")
    return jsonschema.Draft202012Validator(strict_schema(path, "v1"))


@pytest.fixture(scope="module")
def validator() -> Any:
    return validator_of("ray.io_rayservices.yaml")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_ray_service_is_one_of_kuberays(scenario: str, validator: Any) -> None:
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(ray_service(scenario))]
    assert errors == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "rayClusterConfig", "rayVersion"), 2.6),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "container"), []),
        (("spec", "upgradeStrategy", "clusterUpgradeOptions"), {"stepSizePercent": 10}),
    ],
)
def test_the_schema_finds_mistakes(path: tuple[str | int, ...], value: object, validator: Any) -> None:
    broken: Any = copy.deepcopy(ray_service("base"))
    found = broken
    for key in path[:-1]:
        found = found[key]
    found[path[-1]] = value
    assert not validator.is_valid(broken)


@pytest.mark.parametrize("kind", OTHER_CRDS)
def test_gateways_and_monitors_are_their_projects(kind: str) -> None:
    objects = [*of_kind("overlays/inference-gateway", kind), *of_kind("overlays/monitoring", kind)]
    assert objects
    validator = validator_of(OTHER_CRDS[kind])
    for found in objects:
        assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)] == []
        broken: Any = copy.deepcopy(found)
        broken["spec"]["selectors"] = {}
        assert not validator.is_valid(broken)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_and_pods_are_kubernetes_own(scenario: str) -> None:
    for found in build(scenario):
        if found["kind"] not in ("RayService", *OTHER_CRDS):  # of operators, see above
            kubernetes_validate.validate(found, KUBERNETES, strict=True)
    for name, template in pod_templates(scenario):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = name
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_objects_are_different_and_in_one_namespace(scenario: str) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in build(scenario)]
    assert len(set(names)) == len(names)
    for found in build(scenario):
        if found["kind"] == "Namespace":
            assert found["metadata"]["name"] == NAMESPACE
        else:  # one without a namespace would go where the caller's context points
            assert found["metadata"].get("namespace") == NAMESPACE, (found["kind"], found["metadata"]["name"])
    for binding in of_kind(scenario, "RoleBinding"):
        assert [subject["namespace"] for subject in binding["subjects"]] == [NAMESPACE]


def test_overlays_change_something() -> None:
    builds = {name: build(f"overlays/{name}") for name in OVERLAYS}
    for name, objects in builds.items():
        assert objects != build("base"), name
