"""Panels as values, and how they become Grafana's. Knows the look, not what is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos, VariableRefresh, VariableSort
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
NO_TRAFFIC = "No traffic"
COLUMNS = 24

Kind = Literal["number", "lines", "stack", "table"]
_SIZES: dict[Kind, tuple[int, int]] = {"number": (4, 4), "lines": (8, 8), "stack": (8, 8), "table": (12, 10)}


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    kind: Kind
    queries: tuple[Query, ...]
    unit: str = "short"
    about: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice of one, several or all values of a label."""

    label: str
    metric: str


@dataclass(frozen=True, slots=True)
class Board:
    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...] = ()


def panel(
    title: str, kind: Kind, *queries: tuple[str, str] | str, unit: str = "short", about: str = ""
) -> Panel:
    """`queries`: expressions, each with its legend if it has one."""
    pairs = ((query, "") if isinstance(query, str) else query for query in queries)
    return Panel(title, kind, tuple(Query(*pair) for pair in pairs), unit, about)


def build(board: Board) -> dashboard.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"lorafleet-{board.name}")
        .tags(["lorafleet"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in board.variables:
        built.with_variable(_variable(variable))
    for one, at in zip(board.panels, _layout(board.panels), strict=True):
        built.with_panel(_panel(one).grid_pos(at))
    return built


def _layout(panels: Sequence[Panel]) -> Iterator[GridPos]:
    """Row by row; the SDK's own flow runs over the edge where widths differ."""
    x = y = row_height = 0
    for one in panels:
        width, height = _SIZES[one.kind]
        if x + width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        yield GridPos(h=height, w=width, x=x, y=y)
        x, row_height = x + width, max(row_height, height)


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.label)
        .label(variable.label.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({variable.metric}, {variable.label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".+")
    )


def _panel(one: Panel) -> stat.Panel | table.Panel | timeseries.Panel:
    built: stat.Panel | table.Panel | timeseries.Panel
    if one.kind == "number":
        built = stat.Panel().graph_mode(BigValueGraphMode.AREA)
    elif one.kind == "table":
        built = table.Panel()
    else:
        built = _chart(one.kind)
    built.title(one.title).unit(one.unit).datasource(SOURCE).no_value(NO_TRAFFIC)
    if one.about:
        built.description(one.about)
    for index, query in enumerate(one.queries):
        built.with_target(_query(query, chr(ord("A") + index), is_table=one.kind == "table"))
    return built


def _chart(kind: Kind) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    chart = timeseries.Panel().legend(legend).min(0)
    if kind == "stack":
        chart.fill_opacity(40).stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    return chart


def _query(query: Query, ref: str, is_table: bool) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(SOURCE)
    if query.legend:
        built.legend_format(query.legend)
    if is_table:
        return built.instant().format(PromQueryFormat.TABLE)
    return built.range()
