"""A custom resource definition's schema as strict JSON schema: what an API server checks, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def strict_schema(path: Path, version: str) -> dict[str, Any]:
    """Unknown fields are refused, as kubectl does; what has a default need not be given."""
    definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == version)
    schema: dict[str, Any] = found["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True  # not told there
    _make_strict(schema)
    return schema


def _make_strict(schema: dict[str, Any]) -> None:
    properties = schema.get("properties", {})
    if properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema["additionalProperties"] = False
    if "required" in schema:
        schema["required"] = [n for n in schema["required"] if "default" not in properties.get(n, {})]
    inner = [*properties.values(), schema.get("items"), schema.get("additionalProperties")]
    for child in inner:
        if isinstance(child, dict):
            _make_strict(child)
