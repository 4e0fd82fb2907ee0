"""Seconds per iteration over a real network stack, compared with a lower bound.

    python -m experiments.speed network --hosts 4 --bandwidth 200mbit      (as root)
    python -m experiments.speed network                                    (no limits, loopback)

It starts one JAX process per host on this machine; they exchange over TCP (Gloo). With
`--bandwidth` each is in a network namespace, on a link of that bandwidth. They train an MLP of
`--megabytes` of float32 parameters. An iteration begins at a common start and takes as long as the
slowest host. Each round of the measurement runs one iteration of every algorithm, one iteration
without exchange, and plain TCP streams, so that noise affects all of them alike. The lower bound is

    computation + bytes / goodput,  or  max(computation, bytes / goodput)  where the exchange needs
                                        nothing that the step computes, and for buckets

with medians over the same rounds: of the iterations without exchange (on all hosts at once, because
they share the cores), and of the faster kind of stream (from every host to the next at once, as in
a ring, or from one host only). Rows of outer optimizers are made in one go, and so is the
computation that they are compared with; there both are means over whole periods.

README.md in this folder lists the files, columns and fields that it writes into `--out`.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro
from rich.console import Console
from rich.progress import Progress, TaskID

from experiments import results
from experiments.options import (
    NonNegativeFloat,
    NonNegativeInt,
    OptionalPath,
    PositiveInt,
    check_fields,
)
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.hosts import links
from experiments.speed.hosts.processes import (
    PortInUseError,
    find_free_port,
    make_scratch_folder,
    run_hosts,
)
from experiments.speed.network.process import WorkerConfig
from experiments.speed.network.report import write_report
from experiments.speed.network.rows import (
    BUCKETS,
    CENTRALIZED,
    DEFAULT_ALGORITHMS,
    Row,
    build_rows,
)
from experiments.speed.network.summary import list_metrics, summarize_configuration, summarize_row
from experiments.speed.outer_rows import DILOCO, STREAMING_DILOCO, OuterTimes
from experiments.training.methods import ALGORITHM_HELP, WireName

MIN_HOSTS = 2
MAX_HOSTS = 64
MIN_MEGABYTES = 0.001
MIN_ITERATIONS = 10
PORT = 5599  # of host 0 inside its namespace
MAX_PORT_TRIES = 5
PROCESS_BYTES = 700e6  # memory of a host: what JAX takes
MODEL_COPIES = 30  # memory of a host: models at once
STALL_TIMEOUT = 180.0  # seconds; covers a compilation on a slow machine
STALL_FACTOR = 10  # an iteration that takes longer than this times its bound hangs
NETWORK_ALGORITHM_HELP = (
    f"{ALGORITHM_HELP} Here also {CENTRALIZED} (node 0 gathers gradients and sends their mean), "
    f"{BUCKETS} (beside the backward pass), {DILOCO} and {STREAMING_DILOCO}."
)
COMMAND = (sys.executable, "-m", "experiments.speed.network.worker")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the network measurement."""

    hosts: tuple[int, ...] = (4,)
    """Number of hosts, one process each: one or several numbers."""
    bandwidth: tuple[str, ...] = ()
    """Bandwidth of every host's link, each way, as tc reads it (200mbit): one or several; needs
    root. Without it the hosts share the machine's loopback, without limits."""
    megabytes: float = 20.0
    """Float32 parameters of the model, in 1e6 bytes."""
    compute_seconds: NonNegativeFloat = 0.5
    """Seconds of computation per iteration, on all hosts at once, for which the batch is sized."""
    iterations: int = 12
    """Measured iterations of each row, at least 10."""
    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=NETWORK_ALGORITHM_HELP)] = (
        DEFAULT_ALGORITHMS
    )
    wire: Annotated[tuple[WireName, ...], tyro.conf.arg(aliases=["--wire-dtype"])] = (
        "float32",
        "bfloat16",
    )
    """Forms in which messages travel; an algorithm without one of them is left out of its rows."""
    outer_every: PositiveInt = OuterTimes().every
    """Steps from one average to the next, of the diloco rows, whose steps are measured in whole
    such periods."""
    outer_fragments: PositiveInt = OuterTimes().fragments
    """Parts of the model that streaming-diloco averages at different times."""
    outer_delay: NonNegativeInt = OuterTimes().delay
    """Steps between sending a fragment and using its average, of streaming-diloco."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        several = {
            "hosts": self.hosts,
            "algorithm": self.algorithm,
            "wire": self.wire,
        }
        for name, values in several.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} must be one or several different values, got {values}.")
        if min(self.hosts) < MIN_HOSTS or max(self.hosts) > MAX_HOSTS:
            raise ValueError(f"--hosts must be from {MIN_HOSTS} to {MAX_HOSTS}, got {self.hosts}.")
        rates = [links.parse_rate(rate) for rate in self.bandwidth]
        if len(set(rates)) < len(rates):
            raise ValueError(f"--bandwidth must be different values, got {self.bandwidth}.")
        if not MIN_MEGABYTES <= self.megabytes < math.inf:
            raise ValueError(
                f"--megabytes must be finite and >= {MIN_MEGABYTES}, got {self.megabytes}."
            )
        if self.iterations < MIN_ITERATIONS:
            raise ValueError(f"--iterations must be >= {MIN_ITERATIONS}, got {self.iterations}.")

    @property
    def outer_times(self) -> OuterTimes:
        """When the rows of outer optimizers exchange what."""
        return OuterTimes(self.outer_every, self.outer_fragments, self.outer_delay)


class Configuration(NamedTuple):
    """One table of the measurement.

    Attributes:
      hosts: number of hosts.
      bandwidth: of every link, as `tc` reads it; None without limits.
      rows: the algorithms.
    """

    hosts: int
    bandwidth: str | None
    rows: list[Row]

    @property
    def bits_per_second(self) -> int | None:
        """Bandwidth of every link; None without limits."""
        return None if self.bandwidth is None else links.parse_rate(self.bandwidth)

    @property
    def link(self) -> str:
        """Name of the kind of links, as in titles."""
        return self.bandwidth or "loopback"


def measure_network(options: Options) -> None:
    """Seconds per iteration of every algorithm over a network, compared with a lower bound."""
    out = None
    with exit_on_error(lambda: out), links.exit_on_stop_signals():
        rows = {
            n: build_rows(
                options.algorithm, options.wire, n, options.iterations, options.outer_times
            )
            for n in options.hosts
        }
        if options.bandwidth:
            links.require_tools()
        require_memory(max(options.hosts), options.megabytes)
        out = results.create_run_dir("speed-network", options.out, options.overwrite)
        configurations = [
            Configuration(n, bandwidth, rows[n][0])
            for bandwidth, n in itertools.product(options.bandwidth or (None,), options.hosts)
        ]
        left_out = {f"{n} hosts": reasons for n, (_, reasons) in rows.items() if reasons}
        measure_all(options, configurations, left_out, out, Console())


def require_memory(hosts: int, megabytes: float, option: str = "--hosts") -> None:
    """Raises `ValueError` if `hosts` hosts with models of this size need more than is free."""
    needed = hosts * (PROCESS_BYTES + MODEL_COPIES * megabytes * 1e6)
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    if match and needed > (available := 1024 * int(match[1])):
        raise ValueError(
            f"the models of {hosts} hosts must fit into {available / 1e9:.1f} GB of free memory, "
            f"got about {needed / 1e9:.4g} GB with --megabytes {megabytes:g}: lower it, "
            f"or {option}."
        )


def measure_all(
    options: Options,
    configurations: Sequence[Configuration],
    left_out: dict[str, dict[str, str]],
    out: Path,
    console: Console,
) -> None:
    """Measures one configuration after another; writes the files after each, and then the report.

    Args:
      options: of the program.
      configurations: a table each.
      left_out: for each number of hosts, the rows that are not possible, and why.
      out: the folder for the results.
      console: prints the report.
    """
    numbers = ", ".join(map(str, options.hosts))
    kinds = ", ".join(dict.fromkeys(configuration.link for configuration in configurations))
    console.print(
        f"hosts {numbers}; links {kinds}; {options.megabytes:g} MB of parameters; "
        f"{options.iterations} iterations. Results: {out}",
        soft_wrap=True,
    )
    tables: list[Record] = []
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
        for configuration in configurations:
            title = f"{configuration.hosts} hosts, {configuration.link}"
            task = bar.add_task(title, total=options.iterations, status="starting")
            records = run_configuration(
                options, configuration, functools.partial(show_progress, bar, task)
            )
            bar.update(task, status="measured", completed=options.iterations)
            hosts = configuration.hosts
            bandwidth = configuration.bandwidth
            table = summarize_configuration(hosts, bandwidth, records)
            tables.append(table | {"bits_per_second": configuration.bits_per_second})
            runs += [summarize_row(row, table, records) for row in configuration.rows]
            for line in list_metrics(hosts, bandwidth, records):
                file.write(json.dumps(line) + "\n")
            file.flush()
            results.write_summary(
                out,
                dataclasses.asdict(options),
                {"kernel": platform.release(), "cores": os.cpu_count()},
                runs,
                configurations=tables,
                left_out=left_out,
            )
    write_report(out, console)


def show_progress(bar: Progress, task: TaskID, progress: str) -> None:
    """Shows the progress of host 0: its text, and the iterations that are done."""
    match = re.match(r"iteration (\d+)", progress)
    bar.update(task, status=progress, completed=int(match[1]) - 1 if match else 0)


def run_configuration(
    options: Options, configuration: Configuration, report_progress: Callable[[str], None]
) -> list[Record]:
    """Measures all rows over one number of hosts and bandwidth; returns each host's record.

    Raises:
      HostFailedError: if a host ends early or hangs.
      OSError: if the network cannot be made.
    """
    for tries_left in reversed(range(MAX_PORT_TRIES)):
        try:
            return _try_configuration(options, configuration, report_progress)
        except PortInUseError:
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _try_configuration(
    options: Options, configuration: Configuration, report_progress: Callable[[str], None]
) -> list[Record]:
    bits_per_second = configuration.bits_per_second
    network = links.make_network(configuration.hosts, bits_per_second)
    with make_scratch_folder() as folder, network as members:
        port = PORT if bits_per_second else find_free_port()
        config = WorkerConfig(
            coordinator_address=f"{members[0].address}:{port}",
            addresses=[host.address for host in members],
            rows=[(row.algorithm, row.wire) for row in configuration.rows],
            megabytes=options.megabytes,
            compute_seconds=options.compute_seconds,
            iterations=options.iterations,
            outer=options.outer_times,
            secret=secrets.token_hex(),
            interface=links.INTERFACE if bits_per_second else None,
        )
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
        stall_timeout = compute_stall_timeout(options, configuration)
        run_hosts(members, COMMAND, folder, stall_timeout, report_progress)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(members))]


def compute_stall_timeout(options: Options, configuration: Configuration) -> float:
    """Seconds without progress after which the hosts hang: many times the slowest iteration's."""
    bits_per_second = configuration.bits_per_second
    communication_seconds = 0.0
    if bits_per_second is not None:
        model_bits = 8 * options.megabytes * 1e6
        communication_seconds = 2 * configuration.hosts * model_bits / bits_per_second
    return STALL_TIMEOUT + STALL_FACTOR * (communication_seconds + options.compute_seconds)
