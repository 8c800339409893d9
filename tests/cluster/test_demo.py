"""The demo runs to its end as a user starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deployments.demo.prompts import SHOWCASES
from tests.cluster.serve_process import free_port

pytestmark = pytest.mark.cluster


def test_it_runs_once_and_each_adapter_answers() -> None:
    command = [sys.executable, "-m", "deployments.cli", "demo", "--once", "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ready after" in done.stdout
    for item in SHOWCASES:
        assert f"[{item.adapter}]" in done.stdout
    assert "SELECT" in done.stdout
    assert "tokens/s" in done.stdout
    assert "adapters found in: hbm 50%, host 0%, disk 0%, source 50%" in done.stdout
