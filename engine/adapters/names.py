"""Which names an adapter may have: the one grammar for sources, the catalog and HTTP."""

from __future__ import annotations

import re

from engine.errors import InvalidRequest

# no separator, no leading dot: such a name cannot leave the folder or key prefix it is joined to
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def is_adapter_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_adapter_name(name: str, param: str) -> None:
    """Raises InvalidRequest; `param` is the request's field that held the name."""
    if not is_adapter_name(name):
        raise InvalidRequest(
            "an adapter's name has 1 to 128 letters, digits, dots, hyphens and underscores "
            "and starts with a letter or a digit",
            param=param,
        )
