"""What a stored result must say of the code and the machine it was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Of this checkout, and whether files differ from it; `LORAFLEET_COMMIT` tells where there is no git."""
    if told := os.environ.get("LORAFLEET_COMMIT"):
        return f"commit {told}"
    head, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "-uno")
    if not head:
        return "commit unknown"
    return f"commit {head}{' with changes' if changes else ''}"


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def gpu_conditions() -> dict[str, str]:
    import torch  # the load harness does without

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": f"torch {torch.__version__}",
        "commit": commit(),
    }


def _git(*arguments: str) -> str:
    """Nothing if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
