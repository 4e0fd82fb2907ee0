"""Examples per second with slow nodes; computation is a sleep, as if each node had a device.

    python -m experiments.speed stragglers --slowness none 4x random

docs/evidence/speed.md says what it does, and lists the files, columns and fields that it writes.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import gossipjax as gx
from experiments import results
from experiments.options import OutputOptions, PositiveFloat, PositiveInt, require_different
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.wire import links
from experiments.speed.wire.harness import make_display, measure_on_hosts, require_memory
from experiments.speed.wire.report import report_stragglers
from experiments.speed.wire.rows import MAX_HOSTS, MIN_HOSTS, NEVER_WAIT, make_row
from experiments.speed.wire.timed import sleep_gradients
from experiments.speed.wire.worker import Worker
from experiments.training.methods import ALGORITHM_HELP, MethodOptions, make_method
from gossipjax.cost_model import Network, Workload, parse_slowness, simulate

DEFAULT_ALGORITHMS = ("allreduce", "sgp", "1-osgp", "async-sgp", "async-adpsgd")
HELP = f"{ALGORITHM_HELP} Also, of asynchronous nodes, {', '.join(NEVER_WAIT)}."
LEARNING_RATE = 0.05  # of plain SGD
BATCH_SIZE_PER_NODE = 32
COUNTS = ("sent", "kept", "staleness")  # of asynchronous nodes
LOOPBACK = 2e9  # bytes/s: 20 MB take about 10 ms
REPEATS = 10  # of the steps in lockstep, simulated
PARAMETERS = 7850  # 0.03 MB


@dataclasses.dataclass(frozen=True)
class StragglerOptions(OutputOptions):
    """Options of the measurement of slow nodes."""

    nodes: int = 8
    """Number of nodes, one process each."""
    slowness: tuple[str, ...] = ("none", "4x")
    """One or several. none: no node is slow. A factor, as 2x or 4x: each step of node 0 takes this
    many times as long. random: each step of each node takes 1, 2 or 4 times as long. lognormal:
    exp(0.5 g) times as long, with g standard normal."""
    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=HELP)] = DEFAULT_ALGORITHMS
    compute_seconds: PositiveFloat = 0.2
    """Seconds that a step of a node sleeps when it is not slow."""
    steps: PositiveInt = 60
    """Steps of each node, on average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "slowness", "algorithm")
        if not MIN_HOSTS <= self.nodes <= MAX_HOSTS:
            raise ValueError(f"--nodes must be from {MIN_HOSTS} to {MAX_HOSTS}, got {self.nodes}.")
        for name in self.slowness:
            parse_slowness(name, "--slowness")

    @property
    def runs(self) -> list[tuple[str, str]]:
        """Pairs of an algorithm and a slowness, sorted by algorithm."""
        return [(algorithm, name) for algorithm in self.algorithm for name in self.slowness]

    def draw_factors(self, slowness: str, steps: int) -> np.ndarray:
        """Factors of the computation time, `[steps, N]`: of every node at each of its steps."""
        return parse_slowness(slowness).draw(self.nodes, steps, 0)


def make_transform(algorithm: str, options: StragglerOptions) -> optax.GradientTransformation:
    """An algorithm in lockstep, around plain SGD."""
    method = MethodOptions(options.nodes, options.steps)
    return make_method(algorithm, method, optax.sgd(LEARNING_RATE)).transform


Run = Callable[[int, np.ndarray], Record]
"""Makes the run of this number, whose steps sleep for these seconds."""


def compile_lockstep(worker: Worker, options: StragglerOptions, algorithm: str) -> Run:
    """Runs of `gx.TrainStep`, whose programs are compiled at first."""
    tx = make_transform(algorithm, options)
    train_step = gx.TrainStep(sleep_gradients, tx, nodes=worker.nodes)

    def init() -> tuple[Any, Any]:
        return worker.nodes.init(tx, np.zeros(PARAMETERS, np.float32))

    def run_step(step: int, state: tuple[Any, Any], seconds: float) -> tuple[Any, Any]:
        sleep = worker.nodes.put(np.array([seconds], np.float32))
        return jax.block_until_ready(train_step(step, *state, sleep)[:2])

    def run(number: int, seconds: np.ndarray) -> Record:
        state = init()
        ends = []
        worker.gather(0)
        start = time.monotonic()
        for step in range(options.steps):
            state = run_step(step, state, seconds[step % len(seconds)])
            ends.append(time.monotonic())
            report_progress(worker, options, number, step + 1)
        return {"start": start, "ends": ends, **dict.fromkeys(COUNTS)}

    state = init()
    for step in range(1 + max(train_step.canonical_steps(state[1]) or [0])):
        state = run_step(step, state, 0.0)
    return run


def join_nodes(worker: Worker, options: StragglerOptions, algorithm: str) -> Run:
    """Runs of `gx.asynchronous`, each of which is a job."""

    def run(number: int, seconds: np.ndarray) -> Record:
        """Until all nodes together have made N times its steps; a step that has begun ends."""
        ends = []
        with worker.join_job(
            f"stragglers {number}",
            algorithm,
            optax.sgd(LEARNING_RATE),
            jnp.zeros(PARAMETERS),
            sleep_gradients,
            jnp.float32(0),
        ) as node:
            worker.gather(0)
            start = time.monotonic()
            while (done := node.total_steps) < options.steps * options.nodes:
                report_progress(worker, options, number, done / options.nodes)
                node.step(sleep_gradients, jnp.float32(seconds[len(ends) % len(seconds)]))
                ends.append(time.monotonic())
            counts = {name: getattr(node.statistics, name) for name in COUNTS}
            worker.gather(0)  # nobody leaves while others make their last step
        return {"start": start, "ends": ends, **counts}

    return run


def report_progress(
    worker: Worker, options: StragglerOptions, number: int, step: float, status: str = "training"
) -> None:
    """Writes how far the run of this number is."""
    worker.report_progress(status, step, ", ".join(options.runs[number]))


def make_runs(worker: Worker, options: StragglerOptions) -> None:
    """Makes all runs, each from a common start; writes what this node measured in each."""

    @functools.cache
    def make_run(algorithm: str) -> Run:
        make = join_nodes if algorithm in NEVER_WAIT else compile_lockstep
        return make(worker, options, algorithm)

    for number, (algorithm, slowness) in enumerate(options.runs):
        report_progress(worker, options, number, 0, "compiling")
        run = make_run(algorithm)
        # As many steps as the node may make, which begin anew after the last.
        factors = options.draw_factors(slowness, options.steps * options.nodes)
        seconds = (options.compute_seconds * factors[:, worker.rank]).astype(np.float32)
        worker.write_record(number, run(number, seconds))


def measure_stragglers(options: StragglerOptions) -> None:
    """Examples per second with slow nodes."""
    out = None
    with exit_on_error(lambda: out), links.exit_on_stop_signals():
        require_algorithms(options)
        require_memory(options.nodes, 4e-6 * PARAMETERS, "lower --nodes")
        out = results.create_run_dir("speed-stragglers", options.out, options.overwrite)
        console = Console()
        console.print(f"{options.nodes} nodes. Results: {out}", soft_wrap=True)
        with results.make_progress_bar(console) as bar:
            runs = measure_runs(options, out, make_display(bar, options.steps, ""))
        report_stragglers(runs, console)


def require_algorithms(options: StragglerOptions) -> None:
    """Raises `ValueError` for an algorithm that is unknown or impossible here."""
    for name in options.algorithm:
        if name in NEVER_WAIT:
            continue
        if name.startswith("async-"):
            raise ValueError(
                f"--algorithm must be one of {', '.join(NEVER_WAIT)}, or of those in lockstep, got "
                f"{name!r}."
            )
        make_transform(name, options)


def measure_runs(options: StragglerOptions, out: Path, show: Callable[[str], None]) -> list[Record]:
    """Makes all runs, and returns them; writes what was measured, also before a failure."""
    runs: list[Record] = []
    factors = [options.draw_factors(name, options.steps).max() for name in options.slowness]

    def write(records: list[list[Record]]) -> None:
        for run, of_nodes in zip(options.runs, records, strict=False):
            runs.append(summarize_run(*run, options, of_nodes))
        add_ratios(runs)
        environment = {"cores": os.cpu_count(), "computation": "a sleep"}
        results.write_summary(out, dataclasses.asdict(options), environment, runs)

    measure_on_hosts("slow nodes", options, options.nodes, None, max(factors), show, write)
    return runs


def compute_ideal_ratio(factors: np.ndarray, is_lockstep: bool) -> float:
    """Examples per second over those without slow nodes, if only the computation takes time.

    With factors `f`, `[T, N]`: in lockstep all steps take as long as the slowest node's,
    `T / sum_t max_i f[t, i]`. Where nobody waits, each node has its own pace,
    `mean_i T / sum_t f[t, i]`: with one node that is f times slower this is `(N - 1 + 1/f) / N`.

    >>> factors = StragglerOptions(nodes=8).draw_factors("4x", steps=5)
    >>> compute_ideal_ratio(factors, is_lockstep=True)
    0.25
    >>> compute_ideal_ratio(factors, is_lockstep=False)
    0.90625
    """
    if is_lockstep:
        return float(1 / factors.max(axis=1).mean())
    return float((1 / factors.mean(axis=0)).mean())


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


def summarize_run(
    algorithm: str, slowness: str, options: StragglerOptions, records: Sequence[Record]
) -> Record:
    """The object in `runs` of one run, without its ratio to another run."""
    start = min(record["start"] for record in records)
    ends = np.sort(np.concatenate([record["ends"] for record in records])) - start
    factors = options.draw_factors(slowness, options.steps)
    is_lockstep = algorithm not in NEVER_WAIT
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
        "sent": None if is_lockstep else sum(record["sent"] for record in records),
        "kept": None if is_lockstep else sum(record["kept"] for record in records),
        "staleness": None if is_lockstep else np.mean([r["staleness"] for r in records]).item(),
    }


def add_ratios(runs: Sequence[Record]) -> None:
    """Adds to each run the ratios to the run of its algorithm without slow nodes; None without."""
    without = {run["algorithm"]: run for run in runs if run["slowness"] == "none"}
    for run in runs:
        run["ratio_to_none"] = None
        run["ratio_to_ideal"] = None
        if run["algorithm"] in without:
            fastest = without[run["algorithm"]]["examples_per_second"]
            run["ratio_to_none"] = run["examples_per_second"] / fastest
            run["ratio_to_ideal"] = run["ratio_to_none"] / run["ideal_ratio_to_none"]


def simulate_run(algorithm: str, slowness: str, options: StragglerOptions) -> float | None:
    """Examples per second of all nodes in simulated time; None of what the cost model has not.

    The nodes sleep by the factors of the measurement. Nothing else of it is used: the processor
    time of a step, for which a few processes share the cores, is left out.
    """
    row = make_row(algorithm, "float32", options.nodes, options.steps)
    if not row.has_one_cycle:
        return None
    workload = Workload(PARAMETERS, options.compute_seconds, BATCH_SIZE_PER_NODE)
    factors = options.draw_factors(slowness, options.steps * options.nodes)
    steps = options.steps
    if row.waits:
        # Repeated, as fast nodes end up to a step before the slowest, until which is measured.
        factors = factors[:steps]
        steps *= REPEATS
    simulation = simulate(
        row.method, workload, Network(LOOPBACK), options.nodes, factors, steps, warm_up=0
    )
    return simulation.examples_per_second
