"""Examples per second beside slow nodes; computation is a sleep, as of a device that does not
share these cores.

    python -m experiments.speed stragglers
    python -m experiments.speed stragglers --slowness none 4x random --bandwidth 200mbit  (as root)

It starts one JAX process per node on this machine, which train softmax regression on digits, by one
algorithm after another: in lockstep by `gx.TrainStep`, or as nodes that wait for nobody, by
`gx.asynchronous`. At each step a node sleeps for `--compute-seconds` times a factor that says how
slow it is then. All runs see the same number of examples.

README.md in the folder above lists the files, columns and fields that it writes into `--out`.
"""

import dataclasses
import importlib.util
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import optax
from rich.console import Console

from experiments import results
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.wire import links
from experiments.speed.wire.harness import make_display, measure_on_hosts, require_memory
from experiments.speed.wire.report import write_report
from experiments.speed.wire.rows import make_row
from experiments.speed.wire.slow_nodes import (
    BATCH_SIZE_PER_NODE,
    FLOAT_BYTES,
    LEARNING_RATE,
    Options,
    save_data,
)
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import MethodOptions, make_method
from gossipjax.cost_model import Network, Workload, simulate

LOOPBACK = 2e9  # bytes/s: 20 MB take about 10 ms
REPEATS = 10  # of the steps in lockstep, simulated
MIN_PARAMETERS = 7850  # of softmax regression on digits


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
        console.print(f"{options.nodes} nodes. Results: {out}", soft_wrap=True)
        with results.make_progress_bar(console) as bar:
            measure_runs(options, out, make_display(bar, options.steps, ""))
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
            sgd = optax.sgd(LEARNING_RATE)
            make_method(name, MethodOptions(options.nodes, options.steps), sgd)
        elif importlib.util.find_spec("zmq") is None:
            raise ValueError(
                f"--algorithm {name} must be run with pyzmq, got none: pip install "
                '"gossipjax[asynchronous]".'
            )


def measure_runs(options: Options, out: Path, show: Callable[[str], None]) -> None:
    """Makes all runs; writes what was measured, also before a failure."""
    factors = [options.draw_factors(name, options.steps).max() for name in options.slowness]

    def write(records: list[list[Record]]) -> None:
        runs = []
        with (out / "metrics.jsonl").open("w") as file:
            for (algorithm, slowness), of_nodes in zip(options.runs, records, strict=False):
                runs.append(summarize_run(algorithm, slowness, options, of_nodes))
                for line in list_metrics(algorithm, slowness, options, of_nodes):
                    file.write(json.dumps(line) + "\n")
        add_ratios(runs)
        environment = {"cores": os.cpu_count(), "computation": "a sleep"}
        results.write_summary(out, dataclasses.asdict(options), environment, runs)

    measure_on_hosts(
        "slow nodes",
        options,
        options.nodes,
        options.bits_per_second,
        max(factors),
        show,
        write,
        save_data,
    )


def compute_ideal_ratio(factors: np.ndarray, is_lockstep: bool) -> float:
    """Examples per second over those without slow nodes, if only the computation takes time.

    In lockstep a step takes as long as that of its slowest node, `T / sum_t max_i f[t, i]`. Where
    nobody waits, each node has its own pace, `mean_i T / sum_t f[t, i]`: with one node that is
    f times slower this is `(N - 1 + 1/f) / N`.

    Args:
      factors: `[T, N]`.
      is_lockstep: whether nodes wait for each other.

    >>> factors = Options(nodes=8).draw_factors("4x", steps=5)
    >>> compute_ideal_ratio(factors, is_lockstep=True)
    0.25
    >>> compute_ideal_ratio(factors, is_lockstep=False)
    0.90625
    """
    if is_lockstep:
        return float(1 / factors.max(axis=1).mean())
    return float((1 / factors.mean(axis=0)).mean())


def sort_steps(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from the common start to the end of each step of all nodes, in order; their losses.

    Args:
      records: of one run, one from each node.
    """
    start = min(record["start"] for record in records)
    ends = np.concatenate([record["ends"] for record in records]) - start
    losses = np.concatenate([record["losses"] for record in records])
    order = np.argsort(ends, kind="stable")
    return ends[order], losses[order]


def count_steps_per_second(records: Sequence[Record], is_lockstep: bool) -> float:
    """Steps per second of all nodes.

    In lockstep, all steps over the seconds until the last has ended. Where nobody waits, those of
    each node until its last step has ended, summed: the step that a slow node is in the middle of
    when the others end does not count as idle.
    """
    start = min(record["start"] for record in records)
    counts = [len(record["ends"]) for record in records]
    seconds = [record["ends"][-1] - start if record["ends"] else np.inf for record in records]
    if is_lockstep:
        return sum(counts) / max(seconds)
    return float(np.divide(counts, seconds).sum())


def list_metrics(
    algorithm: str, slowness: str, options: Options, records: Sequence[Record]
) -> list[Record]:
    """The lines of `metrics.jsonl`: one for every N steps, in the order in which they ended."""
    ends, losses = sort_steps(records)
    lines = []
    for step in range(1, options.steps + 1):
        chosen = slice((step - 1) * options.nodes, step * options.nodes)
        lines.append(
            {
                "algorithm": algorithm,
                "slowness": slowness,
                "step": step,
                "examples": step * options.nodes * BATCH_SIZE_PER_NODE,
                "seconds": float(ends[chosen][-1]),
                "loss": float(losses[chosen].mean()),
            }
        )
    return lines


def summarize_run(
    algorithm: str, slowness: str, options: Options, records: Sequence[Record]
) -> Record:
    """The object in `runs` of one run, without its ratio to another run."""
    ends, _ = sort_steps(records)
    factors = options.draw_factors(slowness, options.steps)
    is_lockstep = algorithm not in ASYNCHRONOUS
    ideal = compute_ideal_ratio(factors, is_lockstep)
    examples_per_second = BATCH_SIZE_PER_NODE * count_steps_per_second(records, is_lockstep)
    full = options.nodes * BATCH_SIZE_PER_NODE / options.compute_seconds  # if nobody is slow
    limit = ideal * full
    steps = [len(record["ends"]) for record in records]
    modelled = simulate_run(algorithm, slowness, options)
    return {
        "algorithm": algorithm,
        "slowness": slowness,
        "nodes": options.nodes,
        "steps": options.steps,
        "compute_seconds": options.compute_seconds,
        "megabytes": options.megabytes,
        "bits_per_second": options.bits_per_second,
        "seconds": float(ends[options.nodes * options.steps - 1]),
        "examples_per_second": examples_per_second,
        "limit_examples_per_second": limit,
        "ratio_to_limit": examples_per_second / limit,
        "ideal_ratio_to_none": ideal,
        "modelled_examples_per_second": modelled,
        "modelled_ratio": None if modelled is None else modelled / examples_per_second,
        "steps_nodes": steps,
        "steps_min": min(steps),
        "steps_median": statistics.median(steps),
        "loss": records[0]["loss"],
        "sent": None if is_lockstep else sum(record["sent"] for record in records),
        "kept": None if is_lockstep else sum(record["kept"] for record in records),
        "staleness": None if is_lockstep else np.mean([r["staleness"] for r in records]).item(),
    }


def add_ratios(runs: Sequence[Record]) -> None:
    """Adds to each run the ratios to the run of its algorithm without slow nodes; None without one.

    `ratio_to_none` is that of the examples per second, and `ratio_to_ideal` what it is of the ratio
    that it would be if only the computation took time.
    """
    without = {run["algorithm"]: run for run in runs if run["slowness"] == "none"}
    for run in runs:
        run["ratio_to_none"] = None
        run["ratio_to_ideal"] = None
        if run["algorithm"] in without:
            fastest = without[run["algorithm"]]["examples_per_second"]
            run["ratio_to_none"] = run["examples_per_second"] / fastest
            run["ratio_to_ideal"] = run["ratio_to_none"] / run["ideal_ratio_to_none"]


def simulate_run(algorithm: str, slowness: str, options: Options) -> float | None:
    """Examples per second of all nodes in simulated time; None of what the cost model has not.

    The nodes sleep by the factors of the measurement. Nothing else of it is used: the processor
    time of a step, for which a few processes share the cores, is left out.

    >>> simulate_run("allreduce", "4x", Options(nodes=4, steps=10, compute_seconds=0.1)) < 325
    True
    """
    row = make_row(algorithm, "float32", options.nodes, options.steps)
    if not row.has_one_cycle:
        return None
    parameters = max(MIN_PARAMETERS, options.megabytes * 1e6 / FLOAT_BYTES)
    workload = Workload(parameters, options.compute_seconds, BATCH_SIZE_PER_NODE)
    bits = options.bits_per_second
    network = Network(LOOPBACK if bits is None else bits / 8)
    factors = options.draw_factors(slowness, options.steps * options.nodes)
    steps = options.steps
    if row.waits:
        # Repeated, as fast nodes end up to a step before the slowest, until which is measured.
        factors = factors[:steps]
        steps *= REPEATS
    simulation = simulate(row.method, workload, network, options.nodes, factors, steps, warm_up=0)
    return simulation.examples_per_second
