"""`docs/load_tests.md` tells what there is and what was measured."""

from __future__ import annotations

import json
import re

from load_tests.harness.scenarios import SCENARIOS
from load_tests.harness.workload import PRESETS
from tests.k8s.manifests import ROOT

TEXT = (ROOT / "docs" / "load_tests.md").read_text()
RESULTS = ROOT / "load_tests" / "results" / "demo_fleet"


def test_the_figures_are_those_of_the_committed_run() -> None:
    summary = json.loads((RESULTS / "summary.json").read_text())
    group = summary["groups"]["all"]
    told = " ".join(TEXT.split())
    for figure in (
        f"{group['requests']} requests",
        f"{sum(group['errors'].values())} errors",
        f"hit ratio {summary['hit_ratio'] * 100:.1f} %",
        f"{group['ttft_s']['p50']:.2f} s (p50)",
        f"{group['ttft_s']['p95']:.2f} s (p95)",
        f"{group['tpot_s']['p50'] * 1e3:.0f} ms a token",
        f"{group['good_share'] * 100:.0f} % within the objective",
        f"--rate {summary['conditions']['rate']}",
    ):
        assert figure in told, figure


def test_all_presets_and_scenarios_are_told() -> None:
    table = TEXT.partition("## Scenarios")
    named = set()
    for row in re.findall(r"^\| (`.*?`) \|", table[0], re.MULTILINE):
        full, *rest = re.findall(r"`([\w.-]+)`", row)
        stem = full.rpartition("-")[0]
        named |= {full, *(stem + name if name.startswith("-") else name for name in rest)}
    assert named == set(PRESETS)
    assert re.findall(r"^\| `([\w-]+)` \|", table[2], re.MULTILINE) == list(SCENARIOS)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
