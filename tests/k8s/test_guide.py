"""The way from an empty cluster to a hit ratio in `docs/kubernetes.md`: whatever it names is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import yaml

from k8s.dashboards.boards import BOARDS
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, built, containers, ray_service
from tests.k8s.test_monitoring import rules

GUIDE = ROOT / "docs" / "kubernetes.md"
TEXT = GUIDE.read_text()
STEPS = TEXT.partition("## Step by step")[2].partition("\n## ")[0]
BASE = yaml.safe_load((K8S / "base" / "kustomization.yaml").read_text())


def test_its_table_is_the_list_of_overlays() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", TEXT, re.MULTILINE)
    listed = [name for row in rows[1:] for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(listed) == OVERLAYS


def test_what_it_applies_can_be_built() -> None:
    named = set(re.findall(r"kubectl (?:apply -k|kustomize) (k8s/[\w/-]+)(?=\s)", TEXT))
    assert len(named) > 1
    assert all((ROOT / path / "kustomization.yaml").exists() for path in named)


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (GUIDE.parent / link).exists(), link


def test_the_image_it_builds_is_the_one_that_pods_run() -> None:
    (image,) = BASE["images"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    built = re.findall(r"docker build --target (\w+) -t REGISTRY/(\S+) -f (\S+) \.", STEPS)
    assert built
    for target, name, file in built:
        assert name == f"lorafleet:{image['newTag']}"
        assert f" AS {target}\n" in dockerfile
        assert (ROOT / file).exists()
    used = {found["image"] for found in containers("base")}
    assert used == {f"{image['newName']}:{image['newTag']}"}


def test_its_secrets_are_those_that_pods_read() -> None:
    made = set(re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", STEPS))
    read = {
        (ref["name"], ref["key"])
        for container in containers("overlays/production")
        for variable in container.get("env", ())
        if (ref := variable.get("valueFrom", {}).get("secretKeyRef"))
    }
    options = ray_service("overlays/production")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    ref = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert made == read | {(ref["name"], ref["key"])}


def test_it_waits_for_and_asks_what_there_is() -> None:
    name = ray_service("base")["metadata"]["name"]
    assert f"rayservice/{name} " in STEPS
    assert f"service/{name}-serve-svc 8000 " in STEPS, "as the operator names it"
    assert set(re.findall(r"kubectl -n (\w+)", STEPS)) == {BASE["namespace"]}


def test_its_panel_and_its_series_exist() -> None:
    title, panel = re.findall(r'"(lorafleet / \w+)", panel "(.*?)"', STEPS)[0]
    assert panel in {p.title for board in BOARDS if board.title == title for p in board.panels}
    recorded = {rule["record"] for rule in rules("record")}
    assert set(re.findall(r"\w+:lorafleet_\w+:\w+", STEPS)) <= recorded


def test_its_patch_gives_a_scrape_its_key(tmp_path: Path) -> None:
    monitoring = TEXT.partition("## Monitoring with API keys")[2].partition("\n## ")[0]
    (patch,) = re.findall(r"^    patches:\n(?:     .*\n)+", monitoring, re.MULTILINE)
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s" / "overlays" / "monitoring" / "kustomization.yaml"
    overlay.write_text(overlay.read_text() + textwrap.dedent(patch))
    monitors = {
        found["metadata"]["name"]: found["spec"]["podMetricsEndpoints"]
        for found in built(overlay.parent)
        if found["kind"] == "PodMonitor"
    }
    (endpoint,) = monitors.pop("lorafleet-ingress")
    secret = endpoint["authorization"]["credentials"]
    made = re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", monitoring)
    assert made == [(secret["name"], secret["key"])]
    assert not any("authorization" in one for endpoints in monitors.values() for one in endpoints)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `docker build` sends: all that `Dockerfile.dockerignore` lets through."""
    folder = tmp_path_factory.mktemp("context")
    lines = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


def test_the_image_holds_all_that_a_replica_imports_and_shows(context: Path, tmp_path: Path) -> None:
    """As `pip install ./src` builds it there."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(context)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("deployments", "engine", "kernels", "router"):
        for file in (ROOT / package).rglob("*"):
            if file.suffix in (".py", ".js", ".css", ".html", ".safetensors", ".jsonl"):
                assert str(file.relative_to(ROOT)) in held, file


def test_copied_paths_are_in_the_context(context: Path) -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    for path in re.findall(r"^COPY --chown=\S+ (\S+) ", dockerfile, re.MULTILINE):
        assert (context / path).exists(), path
