"""Families of series as Prometheus text: what prometheus_client writes, in less than half of its time.

A scrape of a thousand adapters is 24,000 lines, and while they are written no stream of the process moves.
The names come from our own tables, so they are not checked and escaped anew on each line, as the library
does; the values of labels may hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

_number: Callable[[float], str] = floatToGoString


def text_of(families: Iterable[Metric]) -> str:
    return "".join(_lines(families))


def _lines(families: Iterable[Metric]) -> Iterator[str]:
    escaped: dict[str, str] = {}  # the same few values on many lines
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"# HELP {name} {_escape(family.documentation, quotes=False)}\n# TYPE {name} {family.type}\n"
        for sample in family.samples:
            parts = []
            for label, value in sorted(sample.labels.items()):
                if (shown := escaped.get(value)) is None:
                    shown = escaped[value] = _escape(value)
                parts.append(f'{label}="{shown}"')
            yield f"{sample.name}{{{','.join(parts)}}} {_number(sample.value)}\n"


def _escape(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
