"""One replica: scheduler, page pool, adapter tiers, model, runner. No ray, no HTTP.

Importing this package imports nothing heavy: `engine.scheduler` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.request import RequestOutput
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.engine import Engine

__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "Engine":  # needs torch
        from engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
