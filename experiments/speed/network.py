"""Seconds per iteration of every algorithm over a real network stack, beside the least possible.

    python -m experiments.speed network --hosts 4 --bandwidth 200mbit      (as root)
    python -m experiments.speed network                                    (no limits, loopback)

It starts a JAX process per host on this machine, which exchange over TCP (Gloo); with `--bandwidth`
each is in a network namespace of its own, on a link of that bandwidth. They train an MLP of
`--megabytes` of float32 parameters. An iteration begins at a common start and takes as long as the
slowest host. In every round each algorithm takes one iteration after another, beside an iteration
without exchange and plain TCP streams, so that noise hits all alike. The least that is possible is

    computation + bytes / goodput,  or  max(computation, bytes / goodput)  where the two overlap

with medians of the same rounds: of the iterations without exchange (all hosts at once, since they
share the cores), and of the faster kind of stream: every host to the next one at once, as in a
ring, or one alone.

It writes into `--out`: `metrics.jsonl`, a line per iteration of a row; `summary.json`, with
`configurations` (an object per number of hosts and bandwidth), `runs` (one per row of the tables)
and `left_out`; and plots. Seconds, bytes and bytes per second, unless a name says otherwise.
"""

import dataclasses
import itertools
import json
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import gossipjax as gx
from experiments import results, speed_hosts, speed_links, speed_report, speed_rows
from experiments.speed_rows import Row, Width
from experiments.speed_worker import Setting

Record = dict[str, Any]

MOST_HOSTS = 64
PORT = 5599  # of host 0, where it has a namespace to itself
TRIES = 5  # to find a free port
HOST_BYTES, MODEL_COPIES = 700e6, 30  # memory of a host: what JAX takes, and models at once
PATIENCE = 180.0  # seconds: of a compilation, on a slow machine
SLOWER = 10  # than the link allows: then it hangs
COMMAND = (sys.executable, "-m", "experiments.speed_worker")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the network measurement."""

    hosts: tuple[int, ...] = (4,)
    """Number of hosts, a process each: one or several."""
    bandwidth: tuple[str, ...] = ()
    """Of every host's link, each way, as tc reads it (200mbit): one or several; needs root. Without
    it the hosts share the machine's loopback, without limits."""
    megabytes: float = 20.0
    """Float32 parameters of the model, in 1e6 bytes."""
    compute: float = 0.5
    """Seconds of computation per iteration, all hosts at once, that the batch is sized for."""
    iterations: int = 12
    """Iterations that are measured of each row, at least 10."""
    algorithm: tuple[str, ...] = speed_rows.ALGORITHMS
    """One or several: allreduce, centralized (node 0 gathers gradients and sends their mean), or as
    in experiments.image, NAME or NAME@TOPOLOGY."""
    wire: tuple[Width, ...] = ("float32", "bfloat16")
    """The types in which messages travel; what knows float32 only is left out of the others."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        several = {"hosts": self.hosts, "algorithm": self.algorithm, "wire": self.wire}
        for name, values in several.items():
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} takes one or several different values, not {values}.")
        if min(self.hosts) < 2 or max(self.hosts) > MOST_HOSTS:
            raise ValueError(f"--hosts is from 2 to {MOST_HOSTS}, not {self.hosts}.")
        rates = [speed_links.bits_per_second(rate) for rate in self.bandwidth]
        if len(set(rates)) < len(rates):
            raise ValueError(f"--bandwidth takes different values, not {self.bandwidth}.")
        if not 0.001 <= self.megabytes < math.inf:
            raise ValueError(f"--megabytes is at least 0.001 and finite, not {self.megabytes}.")
        if not 0 <= self.compute < math.inf:
            raise ValueError(f"--compute is at least 0 and finite, not {self.compute}.")
        if self.iterations < 10:
            raise ValueError(f"--iterations is at least 10, not {self.iterations}.")


def require_memory(hosts: int, megabytes: float) -> None:
    """Raises `ValueError` if so many hosts with such a model would not fit into free memory."""
    needed = hosts * (HOST_BYTES + MODEL_COPIES * megabytes * 1e6)
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", meminfo.read_text() if meminfo.exists() else "")
    if found and needed > (available := 1024 * int(found[1])):
        raise ValueError(
            f"{hosts} hosts with {megabytes:g} MB of parameters each need about "
            f"{needed / 1e9:.1f} GB of memory; {available / 1e9:.1f} GB are free. Lower --hosts or "
            "--megabytes."
        )


def network(options: Options) -> None:
    """Seconds per iteration of every algorithm over a network, beside the least possible."""
    try:
        plans = {n: speed_rows.rows(options.algorithm, options.wire, n) for n in options.hosts}
        if options.bandwidth:
            speed_links.require_tools()
        require_memory(max(options.hosts), options.megabytes)
        out = results.claim_folder("speed-network", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    try:
        with speed_links.terminable():
            _measure_all(options, plans, out, Console())
    except (ValueError, OSError, speed_hosts.HostFailedError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"interrupted; {out} holds what was measured", file=sys.stderr)
        sys.exit(130)


def _measure_all(
    options: Options,
    plans: dict[int, tuple[list[Row], dict[str, str]]],
    out: Path,
    console: Console,
) -> None:
    rates = options.bandwidth or (None,)
    console.print(
        f"hosts {', '.join(map(str, options.hosts))}; links {', '.join(map(_link, rates))}; "
        f"{options.megabytes:g} MB of parameters; {options.iterations} iterations. Results: {out}",
        soft_wrap=True,
    )
    configurations: list[Record] = []
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.progress_bar(console) as bar:
        for rate, hosts in itertools.product(rates, options.hosts):
            rows, _ = plans[hosts]
            title = f"{hosts} hosts, {_link(rate)}"
            task = bar.add_task(title, total=options.iterations, status="starting")

            def tell(word: str, task: Any = task) -> None:
                number = re.match(r"iteration (\d+)", word)
                done = int(number[1]) - 1 if number else 0
                bar.update(task, status=word, completed=done)

            found = measure(options, rows, hosts, rate, tell)
            bar.update(task, status="measured", completed=options.iterations)
            bits = None if rate is None else speed_links.bits_per_second(rate)
            configuration, own = speed_rows.summarize(rows, hosts, rate, found)
            configuration["bits_per_second"] = bits
            configurations.append(configuration)
            runs += own
            for line in speed_rows.lines(hosts, rate, found):
                file.write(json.dumps(line) + "\n")
            file.flush()
            summary = {
                "options": dataclasses.asdict(options),
                "environment": environment(),
                "configurations": configurations,
                "runs": runs,
                "left_out": {f"{n} hosts": why for n, (_, why) in plans.items() if why},
            }
            text = json.dumps(summary, indent=2, default=str, allow_nan=False)
            (out / "summary.json").write_text(f"{text}\n")
    speed_report.write_report(out, console)


def _link(rate: str | None) -> str:
    return rate or "loopback"


def environment() -> Record:
    """What it was measured with."""
    versions = {"jax": jax.__version__, "gossipjax": gx.__version__}
    return versions | {"kernel": platform.release(), "cores": os.cpu_count()}


def measure(
    options: Options,
    rows: Sequence[Row],
    hosts: int,
    rate: str | None,
    tell: Callable[[str], None],
) -> list[Record]:
    """What every host has measured, over one number of hosts and bandwidth.

    Raises:
      HostFailedError: if a host ends early or hangs.
      OSError: if the network cannot be made.
    """
    bits = None if rate is None else speed_links.bits_per_second(rate)
    wire = 0.0 if bits is None else 8 * 2 * hosts * options.megabytes * 1e6 / bits
    patience = PATIENCE + SLOWER * (wire + options.compute)
    for tries_left in reversed(range(TRIES)):
        with speed_hosts.scratch_folder() as folder, speed_links.network(hosts, bits) as places:
            port = PORT if bits else speed_hosts.free_port()
            setting = Setting(
                coordinator=f"{places[0].address}:{port}",
                addresses=[place.address for place in places],
                rows=[(row.algorithm, row.wire) for row in rows],
                megabytes=options.megabytes,
                compute=options.compute,
                iterations=options.iterations,
                interface=speed_links.INTERFACE if bits else None,
            )
            (folder / "setting.json").write_text(json.dumps(dataclasses.asdict(setting)))
            try:
                speed_hosts.run_hosts(places, COMMAND, folder, patience, tell)
            except speed_hosts.PortInUseError:
                if not tries_left:
                    raise
                continue
            return [json.loads((folder / f"{i}.json").read_text()) for i in range(hosts)]
    raise AssertionError("unreachable")
