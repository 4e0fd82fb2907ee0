"""Seconds to build, colour, validate and measure the schedule of every topology.

    python -m experiments.speed topologies --nodes 1024

No device is used: schedules are NumPy. Colouring divides the messages of a round into
permutations; validation takes the dense matrices and makes a schedule of them again.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.options.checks import PositiveInt, check_fields
from experiments.options.paths import OptionalPath
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.training.methods import TOPOLOGIES, make_schedule

MAX_MATRIX_ENTRIES = 2**28  # of all rounds: as many as `Schedule.matrices` makes
PARTS = ("build", "color", "validate", "gap", "singular_value", "exact_average")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of schedules."""

    nodes: PositiveInt = 1024
    """Nodes of every schedule."""
    topology: tuple[str, ...] = ()
    """Names of topologies; all if not given."""
    rounds: PositiveInt = 10
    """Rounds of the random ones."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.topology:
            if name not in TOPOLOGIES:
                raise ValueError(
                    f"--topology must be some of {', '.join(TOPOLOGIES)}, got {name!r}."
                )


class Stopwatch:
    """Calls functions and keeps their seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = dict.fromkeys(PARTS)

    def call(self, part: str, function: Callable[[], Any]) -> Any:
        """Returns what the function returns."""
        start = time.perf_counter()
        result = function()
        self.seconds[part] = time.perf_counter() - start
        return result


def validate(schedule: gx.Schedule) -> bool:
    """Makes the schedule again from its matrices; returns whether they are doubly stochastic.

    Raises:
      ValueError: if a matrix is not that of a round.
    """
    return gx.topology.from_matrices(schedule.matrices()).is_doubly_stochastic


def measure_schedule(name: str, options: Options) -> Record:
    """The object in `runs` of `summary.json` of one topology.

    Raises:
      ValueError: if it is impossible for the number of nodes.
    """
    watch = Stopwatch()
    nodes = options.nodes
    schedule = watch.call("build", lambda: make_schedule(name, nodes, options.rounds))
    watch.call("color", lambda: [round_.slots for round_ in schedule.rounds])
    if schedule.period * nodes**2 <= MAX_MATRIX_ENTRIES:
        watch.call("validate", lambda: validate(schedule))
    gap = watch.call("gap", lambda: gx.topology.spectral_gap(schedule))
    singular_value = watch.call(
        "singular_value", lambda: gx.topology.second_singular_value(schedule, schedule.period)
    )
    exact = watch.call("exact_average", lambda: gx.topology.rounds_to_exact_average(schedule))
    return {
        "topology": name,
        "nodes": nodes,
        "rounds": schedule.period,
        "peers": max(round_.max_peers for round_ in schedule.rounds),
        **{f"{part}_seconds": seconds for part, seconds in watch.seconds.items()},
        "spectral_gap": gap,
        "second_singular_value": singular_value,
        "rounds_to_exact_average": exact,
    }


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    table = Table(
        title="Schedules: seconds of each part, and how fast they average",
        caption="gap, sigma 2: of the product over all rounds",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("topology", overflow="fold", min_width=12)
    headers = ("rounds", "peers", "build", "color", "valid", "gap", "sigma2", "exact")
    for header in (*headers, "gap\nis", "sigma2\nis", "exact\nafter"):
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        seconds = [run[f"{part}_seconds"] for part in PARTS]
        exact = run["rounds_to_exact_average"]
        table.add_row(
            run["topology"].replace("_", " "),
            f"{run['rounds']}",
            f"{run['peers']}",
            *("-" if value is None else f"{value:.2f}" for value in seconds),
            f"{run['spectral_gap']:.3f}",
            f"{run['second_singular_value']:.3f}",
            "never" if exact is None else f"{exact}",
        )
    return table


def measure_topologies(options: Options) -> None:
    """Seconds to build, colour, validate and measure the schedule of every topology."""
    out = None
    with exit_on_error(lambda: out):
        out = results.create_run_dir("speed-topologies", options.out, options.overwrite)
        console = Console()
        console.print(f"{options.nodes} nodes. Results: {out}", soft_wrap=True)
        names = options.topology or tuple(TOPOLOGIES)
        runs: list[Record] = []
        left_out: dict[str, str] = {}
        with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
            task = bar.add_task("measuring", total=len(names), status="")
            for name in names:
                bar.update(task, status=name)
                try:
                    runs.append(measure_schedule(name, options))
                    file.write(f"{json.dumps(runs[-1])}\n")
                except ValueError as error:
                    left_out[name] = str(error)
                bar.advance(task)
            bar.update(task, status=f"{len(runs)} rows")
        results.write_summary(out, dataclasses.asdict(options), {"left_out": left_out}, runs)
        if runs:
            console.print(make_table(runs))
        for name, reason in left_out.items():
            console.print(f"left out: {name}: {reason}", soft_wrap=True)
