"""Number formats: what files and configurations call them, and what torch does."""

from __future__ import annotations

import torch

from engine.config import EngineConfig

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""In safetensors, of weights that can be served."""

_CONFIGURED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def served_dtype(config: EngineConfig) -> torch.dtype:
    """Of weights and pool."""
    if config.dtype == "auto":
        return torch.float32 if config.device == "cpu" else torch.bfloat16
    return _CONFIGURED[config.dtype]
