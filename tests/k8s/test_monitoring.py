"""Rules and dashboards: they read series that exist, parse, fire when they ought to, and are explained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.metrics import render
from k8s.dashboards.__main__ import path_of, text_of
from k8s.dashboards.boards import BOARDS
from k8s.dashboards.panels import Board
from tests.k8s.manifests import ROOT, build, of_kind
from tests.k8s.metric_names import LABEL_VALUES, exported, exported_by_ingress, labels_of, read_by

SCENARIO = "overlays/monitoring"
RULES_TEST = Path(__file__).with_name("rules_test.yaml")
RUNBOOK = ROOT / "docs" / "runbook.md"
METRICS = ROOT / "docs" / "metrics.md"
# of the scrape, those that only the buckets of a histogram have, and Ray Serve's
SCRAPE_LABELS = {"job", "pod", "namespace", "le", "deployment"}


def groups() -> list[dict[str, Any]]:
    (rule,) = of_kind(SCENARIO, "PrometheusRule")
    found: list[dict[str, Any]] = rule["spec"]["groups"]
    return found


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"] if kind in rule]


def dashboards() -> Iterator[tuple[str, dict[str, Any]]]:
    """As they are committed."""
    for board in BOARDS:
        yield board.name, json.loads(path_of(board).read_text())


def panel_expressions() -> Iterator[tuple[str, str]]:
    for name, dashboard in dashboards():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]


def substituted(expression: str) -> str:
    """As Grafana sends it."""
    return re.sub(r"\$\w+", ".+", expression.replace("$__rate_interval", "1m"))


def promtool(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("no promtool: install the package prometheus")
    return subprocess.run([binary, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)


def write_rules(tmp_path: Path, found: list[dict[str, Any]]) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": found}))


def scraped() -> dict[str, set[str]]:
    """Labels by name of all series that Prometheus gets of ours."""
    return exported() | exported_by_ingress()


def family_of(name: str) -> str:
    return re.sub(r"_(bucket|count|sum)$", "", name)


def test_no_series_is_scraped_twice() -> None:
    """The pages are of different families, and the one that any ingress gives is asked for at one place."""
    assert not exported().keys() & exported_by_ingress().keys()
    paths = {
        monitor["metadata"]["name"]: (
            endpoint["path"],
            monitor["spec"]["selector"]["matchLabels"].get("app.kubernetes.io/component"),
        )
        for monitor in of_kind(SCENARIO, "PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        if "path" in endpoint
    }
    assert paths == {
        "lorafleet-replicas": ("/metrics", "worker"),
        "lorafleet-ingress": ("/metrics/ingress", "head"),
    }


def test_every_series_that_is_read_exists_with_its_labels() -> None:
    names = scraped()
    recorded = {rule["record"] for rule in rules("record")}
    expressions = [*panel_expressions()]
    expressions += [
        (rule.get("record") or rule["alert"], rule["expr"])
        for kind in ("record", "alert")
        for rule in rules(kind)
    ]
    assert len(expressions) > 60
    for where, expression in expressions:
        found = read_by(expression)
        assert found or "up{" in expression, where
        assert found <= names.keys() | recorded, (where, found - names.keys())
        if not found & recorded:
            known = set().union(*(names.get(name, set()) for name in found))
            assert labels_of(expression) <= known | SCRAPE_LABELS, where


def test_every_family_of_ours_is_on_a_dashboard() -> None:
    shown = set().union(*(read_by(expression) for _, expression in panel_expressions()))
    families = {family_of(name) for name in scraped() if name.startswith("lorafleet_")}
    assert families - {family_of(name) for name in shown} == set()


def test_variables_are_labels_of_series() -> None:
    names = exported()
    for name, dashboard in dashboards():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                match = LABEL_VALUES.match(variable["query"])
                assert match, name
                assert match[2] in names[match[1]], name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_dashboards_are_as_generated(board: Board) -> None:
    """`python -m k8s.dashboards` writes them anew."""
    assert path_of(board).read_text() == text_of(board)


def test_dashboards_lie_in_their_grid() -> None:
    for name, dashboard in dashboards():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at.get("x", 0), at.get("x", 0) + at["w"])
                for y in range(at.get("y", 0), at.get("y", 0) + at["h"])
            }
            assert max(x for x, _ in cells) < 24
            assert not cells & taken, (name, panel["title"])
            taken |= cells
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(set(titles)) == len(titles), name


def test_the_config_map_holds_the_dashboards() -> None:
    (config,) = (found for found in build(SCENARIO) if found["kind"] == "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert sorted(config["data"]) == sorted(path_of(board).name for board in BOARDS)
    for text in config["data"].values():
        assert json.loads(text)["uid"].startswith("lorafleet-")


def test_prometheus_can_parse_everything(tmp_path: Path) -> None:
    asked = [
        {"record": f"panel:number_{i}", "expr": substituted(expression)}
        for i, (_, expression) in enumerate(panel_expressions())
    ]
    write_rules(tmp_path, [*groups(), {"name": "panels", "rules": asked}])
    result = promtool(tmp_path, "check", "rules", "rules.yaml")
    assert result.returncode == 0, result.stderr


def test_alerts_fire_when_they_ought_to(tmp_path: Path) -> None:
    write_rules(tmp_path, groups())
    shutil.copy(RULES_TEST, tmp_path)
    result = promtool(tmp_path, "test", "rules", RULES_TEST.name)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tried_and_explained() -> None:
    tried = {
        one["alertname"]
        for test in yaml.safe_load(RULES_TEST.read_text())["tests"]
        for one in test["alert_rule_test"]
        if one["exp_alerts"]
    }
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    alerts = [rule["alert"] for rule in rules("alert")]
    assert sorted(alerts) == sorted(tried)
    assert sorted(alerts) == sorted(headings)
    for rule in rules("alert"):
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_runbook_and_the_list_of_metrics_name_series_that_exist() -> None:
    names = scraped()
    # told by the API's /metrics alone, which Prometheus does not read in these manifests
    of_the_fleet = set(re.findall(r"^# TYPE (lorafleet_\w+)", render([]), re.MULTILINE))
    families = names.keys() | of_the_fleet | {family_of(name) for name in names}
    recorded = {rule["record"] for rule in rules("record")}
    for path in (RUNBOOK, METRICS):
        named = set(re.findall(r"\b(?:[a-z]+:)?lorafleet_\w+(?::\w+)?|\bvllm:\w+", path.read_text()))
        assert named <= families | recorded, path.name
    listed = set(re.findall(r"^\| `(\w+)`", METRICS.read_text(), re.MULTILINE))
    families = {family_of(name) for name in names if name.startswith("lorafleet_")}
    assert families | of_the_fleet == listed
