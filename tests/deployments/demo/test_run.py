"""What the demo prints, and that it runs to its end as a user starts it."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys

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


@pytest.mark.cluster
def test_the_demo_runs_once_and_each_adapter_answers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "deployments.cli", "demo", "--once", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ready after" in done.stdout
    for item in SHOWCASES:
        assert f"[{item.adapter}]" in done.stdout
    assert "SELECT" in done.stdout
    assert "tokens/s" in done.stdout
    assert "adapters found in: hbm 50%, host 0%, disk 0%, source 50%" in done.stdout
