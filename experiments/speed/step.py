"""Time of one update of a model, with and without gossip, compared with that of a plain copy.

    python -m experiments.speed local step

The model has the size and the arrays of a ResNet-50: 25.6 million float32 in 161 arrays. Only the
update is timed: the gradients are given. All nodes are on this machine, so a message is a copy in
its memory.

An update by SGD with Nesterov momentum and SGP reads the parameters, gradients, momentum, the
values that a node keeps and those that it receives, and writes the parameters, momentum and what it
sends: at least 8 passes over memory, and 5 without gossip. `MIN_PASSES` in updates.py derives those
of every row. The lower bound is the time of these passes at the speed of a plain copy. There are
two such speeds: of a copy into a fresh buffer, which is what JAX does unless an argument is
donated, and of a copy in place, into a buffer that exists.
On a CPU the operating system hands out fresh memory page by page, which takes longer than the copy,
unless `gx.launch.MALLOC_ENVIRONMENT` is in the environment of the program, as in that of every
process of the launcher: then glibc keeps the memory that it had.

`--target gpu` compiles for H100s that need not be present, and only counts passes. README.md in
this folder lists the columns and fields.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.options import OptionalPath, PositiveInt, check_fields
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.targets import choose_targets, make_devices
from experiments.speed.timing import TimedProgram, summarize_samples
from experiments.speed.updates import (
    Shapes,
    Update,
    build_updates,
    count_passes,
    count_updates,
    count_values,
    make_program,
    make_record,
    make_resnet50_shapes,
)
from experiments.training.placement import (
    Placement,
    describe_nodes,
    place_nodes,
    request_cpu_devices,
)

MIN_NODES = 2


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of an update."""

    nodes: int = 4
    """Number of nodes, all on this machine."""
    updates: PositiveInt = 15
    """Timed updates of each kind, of which the median is reported."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    target: Literal["here", "gpu"] = "here"
    """gpu: compile for 8 H100, which need not be present, and count passes; nothing is timed."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.nodes < MIN_NODES:
            raise ValueError(
                f"--nodes must be an integer >= {MIN_NODES}, so that messages are sent, got "
                f"{self.nodes}."
            )


def copy_arrays(tree: Any) -> Any:
    """Copies a pytree."""
    return jax.tree.map(jnp.copy, tree)


class UpdateTimer:
    """Compiled updates and plain copies of a model's size, which take turns.

    Args:
      shapes: of the model's arrays.
      nodes: where the nodes run.
      report_progress: is called before each compilation and turn.
    """

    COPIES = ("fresh_buffer", "in_place")

    def __init__(self, shapes: Shapes, nodes: gx.Nodes, report_progress: Callable[[str], None]):
        self._nodes = nodes
        self._shapes = shapes
        self._report_progress = report_progress
        self._records: list[Record] = []
        self._programs = self._make_copies()
        grads = self._make_zeros()
        for update in build_updates(nodes.size):
            report_progress(f"compiling: {update.name}")
            self._add_update(update, grads)

    @property
    def _values(self) -> int:
        """Number of parameters of all nodes."""
        return self._nodes.size * count_values(self._shapes)

    def _make_zeros(self) -> Any:
        zeros = {
            name: jnp.zeros((self._nodes.size, *shape)) for name, shape in self._shapes.items()
        }
        return self._nodes.run(copy_arrays, zeros)

    def _make_copies(self) -> dict[str, TimedProgram]:
        """The two kinds of plain copies, compiled."""
        copy = self._nodes.spmd(jnp.copy)
        overwrite = self._nodes.spmd(
            lambda target, source: (target.at[:].set(source),), donate_argnums=0
        )
        ones = jnp.ones((self._nodes.size, count_values(self._shapes)))
        source = copy(ones)
        target = jax.block_until_ready(overwrite(copy(source), source))
        programs = (
            TimedProgram(copy, constants=[source]),
            TimedProgram(overwrite, target, constants=[source]),
        )
        return dict(zip(self.COPIES, programs, strict=True))

    def _add_update(self, update: Update, grads: Any) -> None:
        """Compiles an update, counts its passes and runs it once."""
        program = make_program(update, self._nodes, gx.donate_on_accelerators(0, 1))
        params = self._make_zeros()
        opt_state = self._nodes.run(update.tx.init, params)
        # The stack of all nodes of a device is one pass.
        values = self._values * self._nodes.per_device / self._nodes.size
        lowered = program.lower(params, opt_state, grads, update.step)
        passes = count_passes(lowered, 4 * values)
        self._records.append(make_record(update, describe_nodes(self._nodes), passes))
        timed = TimedProgram(program, [params, opt_state], [grads, update.step])
        timed.run()
        self._programs[update.name] = timed

    def time(self, turns: int) -> list[Record]:
        """Times every update and both copies `turns` times; returns the objects in `runs`."""
        samples: dict[str, list[float]] = {name: [] for name in self._programs}
        for turn in range(turns):
            self._report_progress(f"update {turn + 1} of {turns}")
            for name, program in self._programs.items():
                samples[name].append(program.run())
        return [record | self._summarize(record, samples) for record in self._records]

    def _summarize(self, record: Record, samples: dict[str, list[float]]) -> Record:
        seconds = np.array(samples[record["update"]])
        min_bytes = record["min_passes"] * 4 * self._values
        summary = summarize_samples("seconds", seconds)
        summary["bytes_per_second"] = float(np.median(min_bytes / seconds))
        for copy in self.COPIES:
            copy_speeds = 2 * 4 * self._values / np.array(samples[copy])
            summary[f"copy_bytes_per_second_{copy}"] = float(np.median(copy_speeds))
            # Both of the same turn, so that noise affects them alike.
            summary[f"ratio_{copy}"] = float(np.median(seconds * copy_speeds / min_bytes))
        return summary


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    is_timed = "seconds" in runs[0]
    caption = "wire: passes of the exchange"
    if is_timed:
        fresh_buffer = runs[0]["copy_bytes_per_second_fresh_buffer"] / 1e9
        in_place = runs[0]["copy_bytes_per_second_in_place"] / 1e9
        caption += (
            "; x copy: time over that of the least passes at the speed of a plain copy into a "
            f"fresh buffer ({fresh_buffer:.1f} GB/s); x in-place copy: into a buffer that exists "
            f"({in_place:.1f} GB/s)"
        )
    table = Table(
        title="An update of 25.6 million parameters in 161 arrays",
        caption=caption,
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("update", no_wrap=True)
    headers = ["passes", "least", "x least", "wire"]
    if is_timed:
        headers += ["ms", "10-90 %", "x copy", "x in-place\ncopy"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        cells = [run["update"], f"{run['passes']:.1f}", f"{run['min_passes']}"]
        cells += [f"{run['ratio_passes']:.2f}", f"{run['wire_passes']:.1f}"]
        if is_timed:
            cells += [
                f"{1e3 * run['seconds']:.0f}",
                f"{1e3 * run['seconds_p10']:.0f}-{1e3 * run['seconds_p90']:.0f}",
                f"{run['ratio_fresh_buffer']:.2f}",
                f"{run['ratio_in_place']:.2f}",
            ]
        table.add_row(*cells)
    return table


def measure_step(options: Options) -> None:
    """Time of one update of a model, with and without gossip, compared with that of a copy."""
    out = None
    with exit_on_error(lambda: out):
        compile_only = options.target == "gpu"
        if not compile_only and options.placement != "vmap":
            request_cpu_devices(options.nodes)
        targets = choose_targets(("gpu",)) if compile_only else []
        nodes = None if compile_only else place_nodes(options.placement, options.nodes)
        out = results.create_run_dir("speed-step", options.out, options.overwrite)
        console = Console()
        shapes = make_resnet50_shapes()
        runs: list[Record] = []
        description = ""
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("step", total=None, status="")
            for target in targets:
                description = f"compiled for {target.description}, nothing runs"
                bar.update(task, status=description)
                mesh = Mesh(np.array(make_devices(target)), ("nodes",))
                runs += count_updates(shapes, mesh, target.description)
            if nodes is not None:
                description = f"{options.nodes} nodes, {describe_nodes(nodes)}"
                timer = UpdateTimer(shapes, nodes, lambda text: bar.update(task, status=text))
                runs += timer.time(options.updates)
            bar.update(task, total=1, completed=1, status=description)
        environment = {"placement": description}
        results.write_summary(out, dataclasses.asdict(options), environment, runs)
        console.print(make_table(runs))
        console.print(f"{description}. Results: {out}", soft_wrap=True)
