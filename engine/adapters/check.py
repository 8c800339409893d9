"""Would this adapter be served? The answer of `lorafleet check`, by the same code that loads adapters."""

from __future__ import annotations

from typing import Any

import torch

from engine.adapters.image import ImageFormat
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.errors import LorafleetError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_adapter(config: EngineConfig, uri: str) -> dict[str, Any]:
    """The load report, or {"status": "refused", "error": ...}. Raises only for the base model."""
    from engine.model.spec import load_model_spec

    shape = load_model_spec(config.model).shape
    auto = torch.float32 if config.device == "cpu" else torch.bfloat16
    page_elems = shape.page_elems(shape.fit_page_tokens(config.page_tokens))
    try:
        image = load_image(
            uri, ImageFormat(shape, page_elems, _DTYPES.get(config.dtype, auto), config.max_rank)
        )
    except LorafleetError as error:
        return {"status": "refused", "error": error.body()}
    return image.report
