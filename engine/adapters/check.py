"""Would this adapter be served? The answer of `lorafleet check`, by the same code that loads adapters."""

from __future__ import annotations

from typing import Any

from engine.adapters.image import ImageFormat
from engine.adapters.loading import load_image
from engine.config import EngineConfig
from engine.dtypes import served_dtype
from engine.errors import LorafleetError
from engine.model.spec import load_model_spec


def check_adapter(config: EngineConfig, uri: str) -> dict[str, Any]:
    """The load report, or {"status": "refused", "error": ...}. Raises only for the base model."""
    shape = load_model_spec(config.model).shape
    page_elems = shape.page_elems(shape.fit_page_tokens(config.page_tokens))
    try:
        image = load_image(uri, ImageFormat(shape, page_elems, served_dtype(config), config.max_rank))
    except LorafleetError as error:
        return {"status": "refused", "error": error.body()}
    return image.report
