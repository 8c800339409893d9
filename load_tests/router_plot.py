"""The picture of `router_bench`: what each rule costs in each scenario, and how a hot adapter spreads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.simulator import Result

Results = dict[str, dict[str, Result]]  # by scenario, by rule


def plot(results: Results, path: Path) -> None:
    # only this needs matplotlib
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "router"  # the same file for the same figures
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(5, 1, figsize=(11, 15), layout="constrained")
    _bars(axes[0], results, "cold loads per 1000 requests", lambda r: r.cold_per_1000)
    _bars(axes[1], results, "TTFT p99, s", lambda r: r.ttft_p99_s)
    axes[1].set_yscale("log")
    _bars(axes[2], results, "load imbalance", lambda r: r.imbalance)
    _bars(axes[3], results, "within objective, %", lambda r: 100 * r.attainment)
    _copies(axes[4], results["hot"])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.4)
        axis.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _bars(axis: Any, results: Results, label: str, value: Callable[[Result], float]) -> None:
    rules = list(next(iter(results.values())))
    width = 0.85 / len(rules)
    for i, rule in enumerate(rules):
        offsets = [n + (i - (len(rules) - 1) / 2) * width for n in range(len(results))]
        axis.bar(
            offsets, [value(rows[rule]) for rows in results.values()], width, label=rule, color=_color(i)
        )
    axis.set_ylabel(label)
    axis.set_xticks(range(len(results)), list(results))


def _copies(axis: Any, rows: dict[str, Result]) -> None:
    for i, result in enumerate(rows.values()):
        times, counts = zip(*result.copies, strict=True)
        axis.plot(times, counts, color=_color(i), linewidth=2.5 if i == 0 else 0.9)
    axis.set_ylabel("hot: replicas that\nanswer the hot adapter")
    axis.set_xlabel("s")


def _color(i: int) -> str:
    return "black" if i == 0 else f"C{i - 1}"
