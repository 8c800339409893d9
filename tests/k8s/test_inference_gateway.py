"""The inference gateway's parts name each other, our ports and series that a replica exports."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.k8s.manifests import K8S, Object, app_args, build, of_kind, serve_config
from tests.k8s.metric_names import exported

SCENARIO = "overlays/inference-gateway"
# of llm-d's endpoint picker 0.9: what each of its scorers reads
READ_BY = {
    "lora-affinity-scorer": "vllm:lora_requests_info",
    "queue-scorer": "vllm:num_requests_waiting",
    "kv-cache-utilization-scorer": "vllm:kv_cache_usage_perc",
}


def only(kind: str, name: str = "") -> Object:
    (found,) = (found for found in of_kind(SCENARIO, kind) if name in found["metadata"]["name"])
    return found


def picker() -> dict[str, Any]:
    (container,) = only("Deployment")["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def flags() -> dict[str, str]:
    return dict(re.fullmatch(r"--([a-z-]+)=(.*)", flag).groups() for flag in picker()["args"])  # type: ignore[union-attr, misc]


def test_the_route_ends_at_the_pool_and_the_pool_at_the_proxies() -> None:
    gateway, route, pool = only("Gateway"), only("HTTPRoute"), only("InferencePool")
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    ((backend,),) = (rule["backendRefs"] for rule in route["spec"]["rules"])
    assert f"{backend['group']}/v1" == pool["apiVersion"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["spec"]["targetPorts"] == [{"number": serve_config(SCENARIO)["http_options"]["port"]}]
    (rule,) = route["spec"]["rules"]
    longest = app_args(SCENARIO)["graceful_shutdown_timeout_s"]
    assert float(rule["timeouts"]["request"].removesuffix("s")) > longest


def test_the_pool_finds_its_picker_and_the_picker_its_pool() -> None:
    pool, service = only("InferencePool"), only("Service")
    ref = pool["spec"]["endpointPickerRef"]
    assert ref["name"] == service["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    assert ref["port"]["number"] == port["port"]
    ports = {one["name"]: one["containerPort"] for one in picker()["ports"]}
    given = flags()
    assert given["grpc-port"] == str(ports[port["targetPort"]])
    assert given["grpc-health-port"] == str(picker()["readinessProbe"]["grpc"]["port"])
    assert given["pool-name"] == pool["metadata"]["name"]
    assert given["pool-namespace"] == pool["metadata"]["namespace"]
    assert f"{given['pool-group']}/v1" == pool["apiVersion"]


def test_the_picker_reads_series_that_each_replica_exports() -> None:
    assert flags()["model-server-metrics-port"] == str(app_args(SCENARIO)["metrics_port"])
    config = yaml.safe_load(only("ConfigMap")["data"]["picker.yaml"])
    types = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} == READ_BY.keys() <= types
    assert exported().keys() >= set(READ_BY.values())


def test_the_picker_finds_its_file_and_may_read_what_it_watches() -> None:
    spec = only("Deployment")["spec"]["template"]["spec"]
    (volume,), (mount,) = spec["volumes"], picker()["volumeMounts"]
    assert volume["configMap"]["name"] == only("ConfigMap")["metadata"]["name"]
    assert flags()["config-file"] == f"{mount['mountPath']}/picker.yaml"
    role, binding = only("Role"), only("RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"][0]["name"] == spec["serviceAccountName"]
    assert only("ServiceAccount", "endpoint")["metadata"]["name"] == spec["serviceAccountName"]
    assert {r for rule in role["rules"] for r in rule["resources"]} >= {"pods", "inferencepools"}
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_it_is_a_part_of_its_own() -> None:
    """Without the gateway's definitions in a cluster, the base must still apply."""
    assert not [
        found for found in build("base") if found["kind"] in ("Gateway", "HTTPRoute", "InferencePool")
    ]
    assert (K8S / "components" / "inference-gateway").is_dir()
