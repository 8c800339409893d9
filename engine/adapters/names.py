"""Which names an adapter may have: the one grammar for sources, the catalog and HTTP.

One or more parts joined by `/`, as hub ids have; a part holds letters, digits, `.`, `_` and `-` and starts
with a letter, a digit or `_`. So no name leads out of the folder or key prefix that it is joined to, and none
needs escaping in a URL, a log line or a metric label.

What begins with `_` is ours, as `_base` is in metrics: no source, configuration or call gives an adapter such
a name.
"""

from __future__ import annotations

import re

from engine.errors import InvalidRequest

MAX_NAME_LEN = 128
_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*", re.ASCII)


def is_adapter_name(name: str) -> bool:
    return len(name) <= MAX_NAME_LEN and _NAME.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    return name.startswith("_")


def is_folder_name(name: str) -> bool:
    """A name of one part: all that a source can hold, since an adapter is one folder of it."""
    return is_adapter_name(name) and "/" not in name and not is_reserved(name)


def check_adapter_name(name: str, param: str) -> None:
    """Raises InvalidRequest; `param` is the request's field that held the name."""
    if not is_adapter_name(name):
        raise InvalidRequest(
            f"an adapter's name has 1 to {MAX_NAME_LEN} letters, digits, dots, hyphens and underscores, "
            "perhaps in parts joined by slashes, and no part starts with a dot or a hyphen",
            param=param,
        )
