"""Examples per second beside slow nodes; computation is a sleep, as of a device that does not
share these cores.

    python -m experiments.speed stragglers
    python -m experiments.speed stragglers --slowness none 4x random --bandwidth 200mbit  (as root)

It starts one JAX process per node on this machine, which train softmax regression on digits, by one
algorithm after another: in lockstep by `gx.TrainStep`, or as nodes that wait for nobody, by
`gx.asynchronous`. At each step a node sleeps for `--compute-seconds` times a factor that says how
slow it is then. The sleep is a callback inside the compiled step, so that an exchange which can run
beside the computation runs beside the sleep. All runs see the same number of examples.

README.md in the folder above lists the files, columns and fields that it writes into `--out`.
"""

import dataclasses
import importlib.util
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from experiments import results
from experiments.options import OptionalPath, PositiveFloat, PositiveInt, check_fields
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.hosts import links
from experiments.speed.hosts.processes import (
    PortInUseError,
    find_free_port,
    make_scratch_folder,
    run_hosts,
)
from experiments.speed.network.measure import (
    MAX_HOSTS,
    MAX_PORT_TRIES,
    PORT,
    STALL_FACTOR,
    STALL_TIMEOUT,
    require_memory,
)
from experiments.speed.stragglers.node import WorkerConfig, read_records
from experiments.speed.stragglers.problem import make_optimizer, save_data
from experiments.speed.stragglers.report import write_report
from experiments.speed.stragglers.setting import Setting
from experiments.speed.stragglers.slowness import NONE, draw_factors, parse_constant
from experiments.speed.stragglers.summary import add_ratios, list_metrics, summarize_run
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import ALGORITHM_HELP, MethodOptions, make_method

MIN_NODES = 2
DEFAULT_ALGORITHMS = ("allreduce", "sgp", "1-osgp", "async-sgp", "async-adpsgd")
HELP = f"{ALGORITHM_HELP} Of nodes that wait for nobody: {', '.join(ASYNCHRONOUS)}."
COMMAND = (sys.executable, "-m", "experiments.speed.stragglers.worker")
PROGRESS = re.compile(r"run (\d+) step (\d+): (.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of slow nodes."""

    nodes: int = 8
    """Number of nodes, one process each."""
    slowness: tuple[str, ...] = (NONE, "4x")
    """One or several. none: no node is slow. A factor, as 2x or 4x: each step of node 0 takes this
    many times as long. random: each step of each node takes 1, 2 or 4 times as long. lognormal:
    exp(0.5 g) times as long, with g standard normal."""
    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=HELP)] = DEFAULT_ALGORITHMS
    compute_seconds: PositiveFloat = 0.2
    """Seconds that a step of a node sleeps when it is not slow."""
    steps: PositiveInt = 60
    """Steps of each node, on average."""
    megabytes: float = 0.0
    """Float32 parameters, in 1e6 bytes: the model has 0.03, and is padded to this size."""
    bandwidth: str | None = None
    """Bandwidth of every node's link, each way, as tc reads it (200mbit); needs root. Without it
    the nodes share the machine's loopback, without limits."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, values in (("slowness", self.slowness), ("algorithm", self.algorithm)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} must be one or several different values, got {values}.")
        if not MIN_NODES <= self.nodes <= MAX_HOSTS:
            raise ValueError(f"--nodes must be from {MIN_NODES} to {MAX_HOSTS}, got {self.nodes}.")
        if not 0 <= self.megabytes < math.inf:
            raise ValueError(f"--megabytes must be finite and >= 0, got {self.megabytes}.")
        for name in self.slowness:
            parse_constant(name)
        if self.bandwidth is not None:
            links.parse_rate(self.bandwidth)

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Pairs of an algorithm and a slowness, those of an algorithm one after another."""
        return [(algorithm, name) for algorithm in self.algorithm for name in self.slowness]

    @property
    def bits_per_second(self) -> int | None:
        """Bandwidth of every link; None without limits."""
        return None if self.bandwidth is None else links.parse_rate(self.bandwidth)

    @property
    def setting(self) -> Setting:
        """What all runs have in common."""
        return Setting(
            self.nodes, self.steps, self.compute_seconds, self.megabytes, self.bits_per_second
        )


def measure_stragglers(options: Options) -> None:
    """Examples per second, and loss over time, beside slow nodes."""
    out = None
    with exit_on_error(lambda: out), links.exit_on_stop_signals():
        require_algorithms(options)
        if options.bandwidth:
            links.require_tools()
        require_memory(options.nodes, options.megabytes, "--nodes")
        out = results.create_run_dir("speed-stragglers", options.out, options.overwrite)
        console = Console()
        console.print(
            f"{options.nodes} nodes; links {options.bandwidth or 'loopback'}; computation is a "
            f"sleep of {options.compute_seconds:g} s. Results: {out}",
            soft_wrap=True,
        )
        with results.make_progress_bar(console) as bar:
            run_nodes(options, out, Display(bar, options))
        write_report(out, console)


def require_algorithms(options: Options) -> None:
    """Raises `ValueError` for an algorithm that is unknown or impossible here."""
    for name in options.algorithm:
        if name not in ASYNCHRONOUS:
            if name.startswith("async-"):
                raise ValueError(
                    f"--algorithm must be one of {', '.join(ASYNCHRONOUS)}, or of those in "
                    f"lockstep, got {name!r}."
                )
            make_method(name, MethodOptions(options.nodes, options.steps), make_optimizer())
        elif importlib.util.find_spec("zmq") is None:
            raise ValueError(
                f"--algorithm {name} must be run with pyzmq, got none: pip install "
                '"gossipjax[asynchronous]".'
            )


class Display:
    """A bar per run, from the progress of node 0.

    Args:
      bar: shows them.
      options: of the program.
    """

    def __init__(self, bar: Progress, options: Options):
        self._bar = bar
        self._options = options
        self._tasks: list[TaskID] = []

    def show(self, progress: str) -> None:
        """Shows the progress that node 0 has written."""
        match = PROGRESS.fullmatch(progress)
        if match is None:  # read while it is written
            return
        number = int(match[1])
        while len(self._tasks) <= number:
            self.finish()
            title = ", ".join(self._options.runs[len(self._tasks)])
            self._tasks.append(self._bar.add_task(title, total=self._options.steps, status=""))
        self._bar.update(self._tasks[number], completed=int(match[2]), status=match[3])

    def finish(self) -> None:
        """Shows that the runs so far are measured."""
        for task in self._tasks:
            self._bar.update(task, completed=self._options.steps, status="measured")


def run_nodes(options: Options, out: Path, display: Display) -> None:
    """Makes all runs, and writes the files.

    Raises:
      HostFailedError: if a process ends early or hangs.
      OSError: if the network cannot be made.
    """
    for tries_left in reversed(range(MAX_PORT_TRIES)):
        try:
            _try_runs(options, out, display)
        except PortInUseError:
            if not tries_left:
                raise
        else:
            return


def _try_runs(options: Options, out: Path, display: Display) -> None:
    bits_per_second = options.bits_per_second
    network = links.make_network(options.nodes, bits_per_second)
    with make_scratch_folder() as folder, network as members:
        port = PORT if bits_per_second else find_free_port()
        config = WorkerConfig(
            coordinator_address=f"{members[0].address}:{port}",
            addresses=[host.address for host in members],
            runs=options.runs,
            steps=options.steps,
            compute_seconds=options.compute_seconds,
            megabytes=options.megabytes,
            secret=secrets.token_hex() if bits_per_second else None,
        )
        save_data(folder)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        try:
            run_hosts(members, COMMAND, folder, compute_stall_timeout(options), display.show)
            display.finish()
        finally:  # also what was measured before a failure or Ctrl-C
            write_results(options, read_records(folder, options.nodes), out)


def compute_stall_timeout(options: Options) -> float:
    """Seconds without progress after which the nodes hang: many times the slowest step's."""
    exchange_seconds = 0.0
    if options.bits_per_second is not None:
        exchange_seconds = 2 * options.nodes * 8e6 * options.megabytes / options.bits_per_second
    factors = [draw_factors(name, options.nodes, options.steps).max() for name in options.slowness]
    return STALL_TIMEOUT + STALL_FACTOR * (
        exchange_seconds + max(factors) * options.compute_seconds
    )


def write_results(options: Options, records: Sequence[Sequence[Record]], out: Path) -> None:
    """Writes `summary.json` and `metrics.jsonl`.

    Args:
      options: of the program.
      records: of the nodes, for each run that is finished.
      out: the folder.
    """
    runs = []
    with (out / "metrics.jsonl").open("w") as file:
        for (algorithm, slowness), of_nodes in zip(options.runs, records, strict=False):
            runs.append(summarize_run(algorithm, slowness, options.setting, of_nodes))
            for line in list_metrics(algorithm, slowness, options.setting, of_nodes):
                file.write(json.dumps(line) + "\n")
    add_ratios(runs)
    environment = {"cores": os.cpu_count(), "computation": "a sleep"}
    results.write_summary(out, dataclasses.asdict(options), environment, runs)
