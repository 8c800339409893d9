"""Whether requests are traced: if one of OpenTelemetry's own variables asks for it. Imports none of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.spans import Tracing

logger = logging.getLogger(__name__)

EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def is_configured(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get(EXPORTER) == "none":
        return False
    return any(environ.get(name) for name in (EXPORTER, *ENDPOINTS))


def start(environ: Mapping[str, str]) -> Tracing | None:
    """None where nobody asked, or where the packages are missing: no reason not to serve."""
    if not is_configured(environ):
        return None
    try:
        from deployments.spans import Tracing
    except ImportError:
        logger.warning("requests are not traced: pip install 'lorafleet[otel]'")
        return None
    return Tracing.over_otlp()
