"""Pictures of a run: PNG files that a report shows. Knows records and marks, not where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from load_tests.harness.client import Record

BIN_S = 5.0
SIZE = (8.0, 3.2)
DPI = 90
COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea")


class Mark(NamedTuple):
    """Something that was done to the fleet."""

    time_s: float
    text: str


def draw(records: Sequence[Record], marks: Sequence[Mark], folder: Path) -> list[str]:
    """Names of the files that it wrote."""
    groups = sorted({record.group for record in records})
    pictures = {
        "ttft.png": (_ttft, "Time to first token", "s"),
        "rates.png": (_rates, f"Requests, in spans of {BIN_S:g} s", "requests/s"),
        "latencies.png": (_latencies, "Requests answered within", "share"),
    }
    for name, (paint, title, unit) in pictures.items():
        figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
        paint(axes, records, groups)
        if name != "latencies.png":
            _mark(axes, marks)
            axes.set_xlabel("s since the run began")
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
        figure.savefig(folder / name, dpi=DPI)
        plt.close(figure)
    return list(pictures)


def _ttft(axes: Axes, records: Sequence[Record], groups: Sequence[str]) -> None:
    for group, color in zip(groups, COLORS, strict=False):
        seen = [r for r in records if r.group == group and r.ttft_s is not None]
        axes.plot([r.planned for r in seen], [r.ttft_s or 0.0 for r in seen], ".", color=color, label=group)
    failed = [r.planned for r in records if r.error]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color="#dc2626", label="errors", clip_on=False)
    axes.set_ylim(bottom=0)


def _rates(axes: Axes, records: Sequence[Record], groups: Sequence[str]) -> None:
    del groups
    end = max(max(r.planned, r.last or 0.0) for r in records)
    edges = [i * BIN_S for i in range(int(end / BIN_S) + 2)]
    kinds = {
        "due": [r.planned for r in records],
        "answered": [r.last for r in records if r.error is None and r.last is not None],
        "failed": [r.planned for r in records if r.error],
    }
    for (name, times), color in zip(kinds.items(), (COLORS[0], COLORS[2], "#dc2626"), strict=True):
        counts = [sum(low <= time < low + BIN_S for time in times) / BIN_S for low in edges[:-1]]
        if any(counts):
            axes.stairs(counts, edges, color=color, label=name)
    axes.set_ylim(bottom=0)


def _latencies(axes: Axes, records: Sequence[Record], groups: Sequence[str]) -> None:
    """All that the groups have in common is the scale: seconds, logarithmic."""
    for group, color in zip(groups, COLORS, strict=False):
        answered = [r for r in records if r.group == group and r.error is None]
        for name, style in (("ttft_s", "-"), ("e2e_s", "--")):
            values = sorted(value for r in answered if (value := getattr(r, name)) is not None)
            shares = [(i + 1) / len(values) for i in range(len(values))]
            label = f"{group}: {'first token' if name == 'ttft_s' else 'whole'}"
            axes.plot(values, shares, style, color=color, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("s")
    axes.set_ylim(0, 1.02)


def _mark(axes: Axes, marks: Sequence[Mark]) -> None:
    for mark in marks:
        axes.axvline(mark.time_s, color="#475569", linestyle=":", linewidth=1)
        where = axes.get_xaxis_transform()
        axes.text(
            mark.time_s, 0.97, mark.text, transform=where, fontsize="small", rotation=90, ha="right", va="top"
        )
