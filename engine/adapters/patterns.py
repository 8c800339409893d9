"""PEFT's rank_pattern and alpha_pattern: values for the modules whose names match a key.

A key is a regular expression that must match a module's name from a dot, or from its start, to its end; the
first matching key wins. Adapters come from tenants, so only keys that cannot take long are matched:

    key    ^? ( atom quantifier? | group )+ $?
    atom   a letter, digit, hyphen or underscore, an escaped or plain dot, \\d, a character class
    group  ( word | word ... )        quantifier  * + ?
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_MAX_KEYS = 2048  # 7 projections x 126 layers, twice
_MAX_KEY_CHARS = 256
_MAX_STEPS = 100_000  # of backtracking at one place of a module's name, all keys together
_NAME_CHARS = 64  # longer than any module's name

_GROUP = r"\((?:\?:)?[\w-]+(?:\|[\w-]+)*\)"
_ATOM = r"(?:[\w-]|\\?\.|\\d|\[[\w-]+\])"
_KEY = re.compile(rf"\^?(?:{_ATOM}[*+?]?|{_GROUP})+\$?", re.ASCII)


class Patterns:
    def __init__(self, values: Mapping[str, float]) -> None:
        """Raises ValueError, saying which key and why, if a match could take long."""
        if len(values) > _MAX_KEYS:
            raise ValueError(f"{len(values)} keys, at most {_MAX_KEYS} are matched")
        if sum(map(_num_steps, values)) > _MAX_STEPS:
            raise ValueError("its regular expressions could take too long to match")
        self.values = dict(values)
        self._patterns = [(_compile(key), value) for key, value in values.items()]

    def find(self, module: str) -> float | None:
        return next((value for pattern, value in self._patterns if pattern.match(module)), None)


def _compile(key: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(?:.*\.)?(?:{key})$")
    except re.error as error:
        raise ValueError(f"the key {key!r} is no regular expression: {error}") from error


def _num_steps(key: str) -> int:
    """An upper bound for the ways in which a match can be tried."""
    if len(key) > _MAX_KEY_CHARS or _KEY.fullmatch(key) is None:
        raise ValueError(f"the key {key[:80]!r} is not among the regular expressions that are matched")
    num_choices = math.prod(str(group).count("|") + 1 for group in re.findall(_GROUP, key))
    num_quantifiers = len(re.findall(r"[*+?]", re.sub(_GROUP, "", key)))
    # each quantifier ends at or behind the one before it
    return num_choices * math.comb(_NAME_CHARS + num_quantifiers, num_quantifiers)
