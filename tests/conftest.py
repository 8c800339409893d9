"""Settings of the whole test run."""

from __future__ import annotations

import os

# idle OpenMP threads spin for microseconds only: more makes a step many times slower on a busy machine
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import pytest
import torch

if not torch.cuda.is_available():
    # Triton kernels then run in its interpreter; it must know before anything imports it, transformers say
    os.environ["TRITON_INTERPRET"] = "1"

# tiny models: a second thread costs more in hand-overs than it computes
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
