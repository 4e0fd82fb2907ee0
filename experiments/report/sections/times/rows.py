"""Measured and modelled figures side by side, as several sections show them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import Claim, Figure
from experiments.results import Record
from experiments.speed.hosts import links


class TimedRow(NamedTuple):
    """A row of a measurement.

    Attributes:
      setting: of the measurement, by which rows are grouped.
      name: of the algorithm.
      measured: in the unit of the measurement.
      modelled: by the cost model, in the same unit.
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
    """The rows that the cost model has, too.

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


def claim_errors(
    statement: str, paper: str, rows: Sequence[TimedRow], bound: float, unit: str = ""
) -> Claim:
    """The claim that all modelled figures are within a bound of the measured ones.

    Args:
      statement, paper: of the claim.
      rows: with figures; without any, the claim is not judged.
      bound: relative.
      unit: of what the text calls the rows; "rows" if not given.

    >>> claim_errors("close", "10 %", [TimedRow("", "a", 1.0, 1.05)], 0.1).ours
    '+5.0 % to +5.0 % in 1 rows'
    """
    if not rows:
        return Claim(statement, paper, "-", None, is_modelled=True)
    errors = [row.error for row in rows]
    ours = (
        f"{100 * min(errors):+.1f} % to {100 * max(errors):+.1f} % in {len(rows)} {unit or 'rows'}"
    )
    return Claim(statement, paper, ours, max(map(abs, errors)) <= bound, is_modelled=True)


def make_bars(
    name: str,
    caption: str,
    rows: Sequence[TimedRow],
    unit: str,
    bound: float,
    label: str = "modelled",
) -> Figure | None:
    """Measured figures as bars and the modelled ones on them, a panel per setting; None of none."""
    if not rows:
        return None
    groups: dict[str, list[TimedRow]] = {}
    for row in rows:
        groups.setdefault(row.setting, []).append(row)
    return Figure(name, caption, partial(_draw_bars, groups, unit, bound, label))


def _draw_bars(
    groups: Mapping[str, Sequence[TimedRow]],
    unit: str,
    bound: float,
    label: str,
    figure: MatplotlibFigure,
) -> None:
    figure.set_size_inches(7.0, 1.2 + sum(0.5 + 0.24 * len(rows) for rows in groups.values()))
    heights = [1 + len(rows) for rows in groups.values()]
    grid = figure.add_gridspec(len(groups), 1, height_ratios=heights)
    handles = []
    for index, (setting, rows) in enumerate(groups.items()):
        axes = figure.add_subplot(grid[index])
        handles = _draw_panel(axes, rows, bound, label)
        axes.set_title(setting)
        axes.set_xlabel(unit)
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _draw_panel(axes: Axes, rows: Sequence[TimedRow], bound: float, label: str) -> list:
    positions = range(len(rows))
    bars = axes.barh(positions, [row.measured for row in rows], label="measured")
    points = axes.errorbar(
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
    return [bars, points]
