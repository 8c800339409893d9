"""Writes a run down: `summary.json`, pictures, and `report.html`, which shows both."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.harness.client import Record
from load_tests.harness.plots import Mark, draw
from load_tests.harness.summary import Group, Summary

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid; }
img { max-width: 100%; background: white; }
.missed { color: #dc2626; }
"""


def write(
    folder: Path,
    title: str,
    conditions: Mapping[str, Any],
    summary: Summary,
    records: Sequence[Record],
    missed: Sequence[str],
    marks: Sequence[Mark] = (),
) -> None:
    """`conditions`: what was run, so that it can be run again."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {"title": title, "conditions": conditions, **summary.to_dict(), "missed": list(missed)}
    (folder / "summary.json").write_text(json.dumps(data, indent=1) + "\n")
    pictures = draw(records, marks, folder)
    (folder / "report.html").write_text(_page(title, conditions, summary, missed, marks, pictures))


def _page(
    title: str,
    conditions: Mapping[str, Any],
    summary: Summary,
    missed: Sequence[str],
    marks: Sequence[Mark],
    pictures: Iterable[str],
) -> str:
    verdict = [f'<p class="missed">Missed: {html.escape(text)}</p>' for text in missed]
    told = [f"<li>{mark.time_s:.0f} s: {html.escape(mark.text)}</li>" for mark in marks]
    shown = [f'<img src="{name}" alt="{name.removesuffix(".png")} of the run">' for name in pictures]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(verdict or ["<p>All limits were kept.</p>"]),
        _table(("", "requests", "errors", "TTFT p50 / p95 / p99, s", "TPOT p50 / p95 / p99, ms",
                "whole p50 / p95 / p99, s", "tokens/s", "within the SLO"),
               [_row(name, group) for name, group in summary.groups.items()]),
        *([f"<ul>{''.join(told)}</ul>"] if told else []),
        *shown,
        "<h2>Where adapters were found</h2>",
        _hits(summary),
        "<h2>Conditions</h2>",
        _table(("", ""), [(name, str(value)) for name, value in conditions.items()]),
        f"<p>Requests left at most {summary.late_p99_s * 1e3:.0f} ms after they were due (p99).</p>",
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">\
<title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _row(name: str, group: Group) -> tuple[str, ...]:
    errors = ", ".join(f"{count} {code}" for code, count in group.errors.items()) or "0"
    return (
        name, str(group.requests), errors,
        _three(group.ttft_s), _three(group.tpot_s, 1e3), _three(group.e2e_s),
        f"{group.output_tokens_per_s:.1f}", f"{group.good_share:.1%}",
    )  # fmt: skip


def _three(percentiles: Mapping[str, float], scale: float = 1.0) -> str:
    return " / ".join(f"{value * scale:.3g}" for value in percentiles.values()) or "none"


def _hits(summary: Summary) -> str:
    total = sum(summary.hits.values())
    if not total:
        return "<p>The server does not tell.</p>"
    rows = [(tier, f"{count:.0f}", f"{count / total:.1%}") for tier, count in summary.hits.items()]
    return _table(("tier", "lookups", "share"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"
