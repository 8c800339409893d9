"""What the demo prints."""

from __future__ import annotations

import json
import shlex

import pytest

from deployments.demo.prompts import SHOWCASES
from deployments.demo.run import hit_rates, print_ready

METRICS = """\
# TYPE lorafleet_adapter_lookups_total counter
lorafleet_adapter_lookups_total{adapter="a",tier="hbm",replica="r1"} 5
lorafleet_adapter_lookups_total{adapter="a",tier="host",replica="r1"} 1
lorafleet_adapter_lookups_total{adapter="b",tier="disk",replica="r2"} 1
lorafleet_adapter_lookups_total{adapter="b",tier="source",replica="r2"} 2
"""


def test_the_printed_requests_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    print_ready("http://127.0.0.1:8000")
    text = capsys.readouterr().out.replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("curl ")]
    assert [command[1] for command in commands] == ["http://127.0.0.1:8000/v1/chat/completions"] * 3
    bodies = [json.loads(command[command.index("-d") + 1]) for command in commands]
    assert [body["model"] for body in bodies] == [item.adapter for item in SHOWCASES]
    assert [body["messages"][0]["content"] for body in bodies] == [item.prompt for item in SHOWCASES]


def test_hit_rates_cover_all_adapters_and_replicas() -> None:
    assert hit_rates(METRICS) == "adapters found in: hbm 56%, host 11%, disk 11%, source 22%"
    assert hit_rates("") == "adapters found in: hbm 0%, host 0%, disk 0%, source 0%"
