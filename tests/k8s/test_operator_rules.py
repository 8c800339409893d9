"""What KubeRay's operator refuses beyond its schema, and what Kubernetes only finds out when pods start."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

import pytest
from ray.scripts.scripts import drain_node

from tests.k8s.manifests import (
    K8S,
    ROOT,
    SCENARIOS,
    app_args,
    build,
    cluster,
    containers,
    of_kind,
    pod_templates,
    ray_service,
    worker_group,
)

RAY = version("ray")
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS)


@each_scenario
def test_names_leave_room_for_what_the_operator_appends(scenario: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", ray_service(scenario)["metadata"]["name"])
    assert "headService" not in cluster(scenario)["headGroupSpec"]


@each_scenario
def test_worker_groups_have_sane_bounds(scenario: str) -> None:
    group = worker_group(scenario)
    assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert "resources" not in group, "the pods' limits say it"
    is_fixed = group["minReplicas"] == group["maxReplicas"]
    assert is_fixed is not cluster(scenario).get("enableInTreeAutoscaling", False)


@each_scenario
def test_the_second_autoscaler_wants_pods_that_never_restart(scenario: str) -> None:
    if cluster(scenario).get("autoscalerOptions", {}).get("version") != "v2":
        return
    templates = [cluster(scenario)["headGroupSpec"]["template"], worker_group(scenario)["template"]]
    assert [template["spec"]["restartPolicy"] for template in templates] == ["Never", "Never"]
    assert templates[0]["spec"]["automountServiceAccountToken"], "it changes the cluster's object"


@each_scenario
def test_an_upgrade_in_steps_has_steps_and_room(scenario: str) -> None:
    strategy = ray_service(scenario)["spec"]["upgradeStrategy"]
    if strategy["type"] == "NewCluster":
        assert "clusterUpgradeOptions" not in strategy
        return
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    options = strategy["clusterUpgradeOptions"]
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100
    assert options["intervalSeconds"] > 0
    assert options["gatewayClassName"]
    assert cluster(scenario)["enableInTreeAutoscaling"], "the operator asks for it"


@each_scenario
def test_redis_is_given_in_one_place(scenario: str) -> None:
    names = {variable["name"] for found in containers(scenario) for variable in found.get("env", ())}
    assert not names & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_enable_autoscaler_v2"}
    assert "redis-password" not in cluster(scenario)["headGroupSpec"]["rayStartParams"]
    if options := cluster(scenario).get("gcsFaultToleranceOptions"):
        (service,) = of_kind(scenario, "Service")
        (port,) = service["spec"]["ports"]
        assert options["redisAddress"] == f"{service['metadata']['name']}:{port['port']}"


@each_scenario
def test_images_hold_the_ray_that_we_pin(scenario: str) -> None:
    assert cluster(scenario)["rayVersion"] == RAY
    ours = {found["image"] for found in containers(scenario) if found["name"].startswith("ray-")}
    (image,) = ours
    assert image.endswith(f":{version('lorafleet')}-ray{RAY}")


def test_the_image_is_built_from_that_ray_and_python() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert f"ARG RAY_VERSION={RAY}\n" in text
    assert f"{version('lorafleet')}-ray{RAY}" in text
    assert set(re.findall(r"AS (\w+)", text)) == {"base", "cpu", "cuda"}
    for path in re.findall(r"^COPY --chown=\S+ (\S+) ", text, re.MULTILINE):
        assert (ROOT / path).exists(), path


@each_scenario
def test_pods_are_restricted(scenario: str) -> None:
    """What the namespace's pod security level asks for, and a root file system that cannot be written."""
    for name, template in pod_templates(scenario):
        context = template["spec"]["securityContext"]
        assert context["runAsNonRoot"], name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & template["spec"].keys(), name
        for volume in template["spec"].get("volumes", ()):
            assert "hostPath" not in volume, (name, volume)
    options = cluster(scenario).get("autoscalerOptions")
    for found in (*containers(scenario), *([options] if options else [])):
        assert found["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "limits" in found["resources"]


@each_scenario
def test_ray_can_write_where_it_must(scenario: str) -> None:
    for template in (cluster(scenario)["headGroupSpec"]["template"], worker_group(scenario)["template"]):
        (ray,) = template["spec"]["containers"]
        volumes = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in ray["volumeMounts"]}
        assert mounts["/dev/shm"]["medium"] == "Memory"
        assert mounts["/tmp"].get("medium") is None
        # an emptyDir in memory counts as the container's
        assert _bytes(mounts["/dev/shm"]["sizeLimit"]) < _bytes(ray["resources"]["limits"]["memory"])
        for variable in ray["env"]:
            value = variable.get("value", "")
            if value.startswith("/"):
                assert any(value.startswith(path) for path in mounts), value


@each_scenario
def test_a_worker_has_time_to_start_and_to_drain(scenario: str) -> None:
    spec = worker_group(scenario)["template"]["spec"]
    (ray,) = spec["containers"]
    probe = ray["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 600
    script = ray["lifecycle"]["preStop"]["exec"]["command"][-1]
    drain_s = int(re.findall(r"SECONDS \+ (\d+)", script)[0])
    assert app_args(scenario)["graceful_shutdown_timeout_s"] < drain_s
    assert drain_s < spec["terminationGracePeriodSeconds"]
    assert f"http://127.0.0.1:{app_args(scenario)['metrics_port']}/" in script


def test_ray_knows_the_drain_command() -> None:
    """It is hidden, so it may change."""
    template = worker_group("base")["template"]
    script = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    options: dict[str, Any] = {option: p for p in drain_node.params for option in p.opts}
    used = re.findall(r"--[a-z-]+", script.split("deadline=")[0])
    assert used
    assert set(used) <= options.keys()
    assert {name for name, p in options.items() if p.required} <= set(used)
    assert re.findall(r"--reason (\S+)", script)[0] in options["--reason"].type.choices


@each_scenario
def test_selectors_find_pods_and_ports_have_names(scenario: str) -> None:
    pods = [
        (
            template["metadata"]["labels"],
            {p["name"] for c in template["spec"]["containers"] for p in c["ports"]},
        )
        for _, template in pod_templates(scenario)
    ]

    def chosen(selector: dict[str, Any]) -> list[set[str]]:
        labels, expressions = selector.get("matchLabels", {}), selector.get("matchExpressions", ())
        return [
            ports
            for found, ports in pods
            if labels.items() <= found.items()
            and all(found.get(one["key"]) in one["values"] for one in expressions)
        ]

    for budget in of_kind(scenario, "PodDisruptionBudget"):
        assert len(chosen(budget["spec"]["selector"])) == 1
    for service in of_kind(scenario, "Service"):
        (ports,) = chosen({"matchLabels": service["spec"]["selector"]})
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for pool in of_kind(scenario, "InferencePool"):
        (ports,) = chosen(pool["spec"]["selector"])
        assert "serve" in ports
    for monitor in of_kind(scenario, "PodMonitor"):
        found = chosen(monitor["spec"]["selector"])
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        assert scraped <= set().union(*found)


def test_the_network_policy_opens_what_others_need_and_nothing_of_rays() -> None:
    scenario = "overlays/network-policy"
    (policy,) = of_kind(scenario, "NetworkPolicy")
    by_namespace: dict[str, set[int]] = {}
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            if "namespaceSelector" in peer:
                (name,) = peer["namespaceSelector"]["matchLabels"].values()
                by_namespace[name] = {port["port"] for port in rule["ports"]}
    ports = {port["name"]: port["containerPort"] for found in containers(scenario) for port in found["ports"]}
    assert by_namespace["ingress"] == {ports["serve"]}
    scraped = {
        endpoint["port"]
        for monitor in of_kind("overlays/monitoring", "PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    assert by_namespace["monitoring"] == {ports[name] for name in scraped}
    assert not {ports["gcs"], ports["client"]} & set().union(*by_namespace.values())


def test_production_is_all_components() -> None:
    kinds = {found["kind"] for found in build("overlays/production")}
    assert kinds >= {"NetworkPolicy", "PodMonitor", "PrometheusRule", "StatefulSet", "ConfigMap"}
    assert cluster("overlays/production")["enableInTreeAutoscaling"]
    components = {path.name for path in (K8S / "components").iterdir()}
    assert components <= {path.name for path in (K8S / "overlays").iterdir()}, (
        "each has an overlay of its own"
    )


def _bytes(quantity: str) -> int:
    assert quantity.endswith("Gi"), quantity
    return int(quantity.removesuffix("Gi")) << 30
