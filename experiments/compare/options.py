"""The options of the program, and the grid that they mean."""

import dataclasses
import itertools
from collections.abc import Sequence

from experiments.compare.grids import GRIDS, Grid, Line
from experiments.options import PositiveFloat, RunsOptions, Seed, option_name
from experiments.presets.preset import Program
from experiments.training.methods import find_algorithm, import_function, parse_name

ALGORITHMS_IF_NONE = ("sgp", "allreduce")
PROGRAM_IF_NONE: Program = "image"
ROWS_AND_COLUMNS = ("algorithm", "topology", "momentum", "wire", "dirichlet_alpha")
OF_EVERY_RUN = ("--out", "--overwrite", "--resume")  # each run has its folder
EVEN = Line("even data", ())
DEFAULT = Line("", ())


@dataclasses.dataclass(frozen=True)
class CompareOptions(RunsOptions):
    """Runs a grid of methods, and makes one table.

    Options of the program that trains stand after `--`, for all runs."""

    grid: str | None = None
    """relaysgd-table2, the published table, or methods-mini; it has rows, columns and program."""
    program: Program | None = None
    """The program that trains; if not given, image."""
    task: str | None = None
    """MODULE:FUNCTION, your own model and data, in place of a program; see docs/study.md."""
    algorithm: tuple[str, ...] = ()
    """One or several, NAME, NAME@TOPOLOGY or, one of your own, MODULE:FUNCTION; if not given, sgp
    and allreduce."""
    topology: tuple[str, ...] = ()
    """One or several, for each algorithm named without one; if not given, as in its paper."""
    momentum: tuple[str, ...] = ()
    """One or several of what --momentum of the program takes; if not given, its default."""
    wire: tuple[str, ...] = ()
    """One or several of what --wire of the program takes; if not given, its default."""
    dirichlet_alpha: tuple[PositiveFloat, ...] = ()
    """One or several, a column each: how unevenly classes are divided. If not given, evenly."""
    seed: tuple[Seed, ...] = ()
    """One or several; if not given, as in the grid, or 0 1 2."""
    rates: tuple[PositiveFloat, ...] = ()
    """Learning rates, instead of the rates of --grid. Each row and column takes the best at the
    first seed, and the other seeds run at it. The table says where it is an end."""
    metric: str | None = None
    """The metric of the table, such as accuracy or loss; if not given, the program's first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*ROWS_AND_COLUMNS, "seed", "rates"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{option_name(name)} must be different values, got {values}.")
        if self.grid is not None and self.grid not in GRIDS:
            raise ValueError(f"--grid must be one of {', '.join(GRIDS)}, got {self.grid!r}.")
        if self.task is not None and self.program is not None:
            raise ValueError(
                f"--task must be left out with --program, got {self.task} and {self.program}: "
                "leave one of them out."
            )
        for name in ("program", "task", *ROWS_AND_COLUMNS):
            if self.grid is not None and getattr(self, name):
                raise ValueError(
                    f"{option_name(name)} must be left out with --grid, which has its own program, "
                    f"rows and columns, got {getattr(self, name)}: leave one of them out."
                )


def make_grid(options: CompareOptions, arguments: Sequence[str]) -> Grid:
    """Returns the grid of the options; all runs also have these `arguments`."""
    grid = _make_grid(options) if options.grid is None else GRIDS[options.grid]
    if options.rates:
        grid = _choose_among(grid, options.rates)
    own = ("seed", "rates", "task", "out", "overwrite")
    own += ROWS_AND_COLUMNS if options.grid is None else ()
    _require_free(grid, arguments, [option_name(name) for name in own])
    return dataclasses.replace(
        grid,
        arguments=(*grid.arguments, *arguments),
        seeds=options.seed or grid.seeds,
        metric=options.metric or grid.metric,
    )


def _choose_among(grid: Grid, rates: Sequence[float]) -> Grid:
    """The grid with a choice among these rates in every row; its own must not be fixed."""
    if grid.cells:  # options of single cells, which are the rates of a published table
        raise ValueError(
            f"--rates must be left out where a grid has fixed rates, as {grid.title!r}, "
            f"got {' '.join(f'{rate:g}' for rate in rates)}."
        )
    return dataclasses.replace(
        grid, rates=dict.fromkeys((row.title for row in grid.rows), tuple(sorted(rates)))
    )


def _require_free(grid: Grid, arguments: Sequence[str], own: Sequence[str]) -> None:
    """Raises `ValueError` for one of `arguments` that would lose to one of the grid."""
    taken = {*OF_EVERY_RUN, *itertools.chain.from_iterable(c.arguments for c in grid.list_cells())}
    for argument in arguments:
        given = argument.partition("=")[0].replace("_", "-")
        option = "--wire" if given == "--wire-dtype" else given
        names = {option, option.replace("--no-", "--", 1)}
        if option.startswith("--") and not taken.isdisjoint(names):
            raise ValueError(
                "what stands after -- must have no option that the comparison sets for its runs, "
                f"got {given}: {'give it before --' if option in own else 'leave it out'}."
            )


def _make_grid(options: CompareOptions) -> Grid:
    names = list(
        dict.fromkeys(
            name
            for algorithm in options.algorithm or ALGORITHMS_IF_NONE
            for name in _list_names(algorithm, options.topology)
        )
    )
    rows = tuple(
        _join_lines(lines)
        for lines in itertools.product(
            [Line(name, ("--algorithm", name)) for name in names],
            [Line(f"{name} momentum", ("--momentum", name)) for name in options.momentum]
            or [DEFAULT],
            [Line(name, ("--wire", name)) for name in options.wire] or [DEFAULT],
        )
    )
    columns = tuple(
        Line(f"Dirichlet {alpha:g}", ("--dirichlet-alpha", f"{alpha!r}"))
        for alpha in options.dirichlet_alpha
    )
    program = options.program or PROGRAM_IF_NONE
    grid = Grid(
        title=f"experiments.{program}", program=program, rows=rows, columns=columns or (EVEN,)
    )
    if options.task is None:
        return grid
    import_function(options.task, "--task")  # an error comes before the first run
    arguments = ("--task", options.task)
    return dataclasses.replace(grid, title=options.task, program="own", arguments=arguments)


def _join_lines(lines: Sequence[Line]) -> Line:
    """A line with the titles and the arguments of several."""
    title = ", ".join(line.title for line in lines if line.title)
    return Line(title, tuple(itertools.chain.from_iterable(line.arguments for line in lines)))


def _list_names(algorithm: str, topologies: Sequence[str]) -> list[str]:
    """The algorithm on each of the topologies that it can have."""
    parsed = parse_name(algorithm)
    if parsed.topology is not None or not topologies or find_algorithm(parsed.row).fixed_topology:
        return [algorithm]
    return [f"{algorithm}@{topology}" for topology in topologies]
