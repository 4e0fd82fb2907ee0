"""Measured and modelled figures side by side, as the sections on time show them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.estimates import exact
from experiments.report.section import Claim, Figure
from experiments.results import Record
from experiments.speed.hosts import links


class TimedRow(NamedTuple):
    """A figure that was measured, and what the model or the simulation says, in one unit.

    Rows are grouped by their setting; their name is that of the algorithm.
    """

    setting: str
    name: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """`modelled / measured - 1`.

        >>> TimedRow("1gbit", "sgp", 0.5, 0.6).error
        0.2
        """
        return round(self.modelled / self.measured - 1, 12)


def can_limit_links() -> bool:
    """Whether links of a bandwidth can be made here: that needs Linux, root, ip and tc."""
    try:
        links.require_tools()
    except (ValueError, AttributeError):  # Windows knows no users by number
        return False
    return True


def list_rows(runs: Iterable[Record], setting: str, field: str, model: str) -> list[TimedRow]:
    """Returns the rows that the model has, too.

    Args:
      runs: of `summary.json`.
      setting: the name of the field by which rows are grouped.
      field, model: the names of the fields of the measured and of the modelled figure.
    """
    return [
        TimedRow(f"{run[setting] or 'loopback'}", run["algorithm"], run[field], run[model])
        for run in runs
        if run[model] is not None
    ]


def judge_errors(
    statement: str, paper: str, rows: Sequence[TimedRow], bound: float, if_not: str = ""
) -> Claim:
    """Returns the claim that all modelled figures are within a bound of the measured ones.

    >>> judge_errors("close", "10 %", [TimedRow("", "a", 1.0, 1.05)], 0.1).ours
    'a +5.0%'
    """
    errors = {f"{row.setting} {row.name}".strip(): exact(row.error) for row in rows}
    return Claim(
        statement,
        paper,
        errors,
        at_least=-bound,
        at_most=bound,
        spec="+.1%",
        is_modelled=True,
        if_not=if_not,
    )


def make_bars(
    name: str,
    caption: str,
    rows: Sequence[TimedRow],
    unit: str,
    bound: float,
    label: str = "modelled",
) -> list[Figure]:
    """Measured figures as bars with the modelled ones on them, a panel per setting; [] of none."""
    groups: dict[str, list[TimedRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    draw = partial(_draw_bars, groups, unit, bound, label)
    return [Figure(name, caption, draw)] if rows else []


def _draw_bars(
    groups: Mapping[str, Sequence[TimedRow]],
    unit: str,
    bound: float,
    label: str,
    figure: MatplotlibFigure,
) -> None:
    heights = [1 + len(rows) for rows in groups.values()]
    figure.set_size_inches(7.0, 1.0 + sum(0.26 + 0.24 * height for height in heights))
    grid = figure.add_gridspec(len(groups), 1, height_ratios=heights)
    for index, (setting, rows) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[index])
        _draw_panel(axes, rows, bound, label)
        axes.set_title(setting)
        axes.set_xlabel(unit)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)


def _draw_panel(axes: Axes, rows: Sequence[TimedRow], bound: float, label: str) -> None:
    positions = range(len(rows))
    axes.barh(positions, [row.measured for row in rows], label="measured")
    axes.errorbar(
        [row.modelled for row in rows],
        positions,
        xerr=[bound * row.modelled for row in rows],
        fmt="k|",
        markersize=9,
        capsize=2,
        label=f"{label}, ± {bound:.0%}",
    )
    axes.set_yticks(positions, [row.name for row in rows])
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
