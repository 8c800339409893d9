"""Settings of the whole test run."""

from __future__ import annotations

import os

# idle OpenMP threads sleep: on a busy machine, spinning makes a step many times slower
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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
