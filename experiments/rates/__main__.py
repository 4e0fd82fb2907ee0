"""Measures how the gradient shrinks with the steps and the nodes, and compares with SGP-19.

    python -m experiments.rates

SGD on a smooth problem that is not convex, with other data on each node, normal noise and a known
optimum (`experiments.rates.problem`), for each method, number of nodes n and number of steps K with
the learning rate `sqrt(n / K)`. The nodes are simulated by `vmap`: the algorithms are the
library's, but nothing is exchanged between machines. With `mean` the average model, measured are

    1/K sum_k ||grad f(mean_k)||^2           theorem 1: <= 12 (f(0) - f* + L sigma^2/2) / sqrt(nK)
    1/(nK) sum_k sum_i ||z_ik - mean_k||^2   theorem 2: O(1/K + 1/K^1.5)

and the slopes of the first in nK, in K and in n. These are of the runs with `K >= n^3`: from there
on, what the disagreement of the nodes adds is small. The program writes into `--out`
`metrics.jsonl`, with a line for each run and number of steps `step`, in powers of two, and
`summary.json`, whose `slopes` have limits of 95 %, or are null.

References:
  Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
  arXiv:1811.10792, theorems 1 and 2 (SGP-19).
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID

from experiments import results
from experiments.options import (
    Check,
    OutputOptions,
    PositiveInt,
    parse_arguments,
    require_different,
)
from experiments.program import FatalError, exit_on_error
from experiments.rates import problem, report
from experiments.rates.fits import is_in_regime
from experiments.rates.measurement import BLOCK, Means, Simulation, find_rate
from experiments.results import Record

MAX_NODES = 1024
MAX_STEPS = 2**24
MAX_MODELS = 2**15  # nodes times seeds: the noise of a block then has 537 MB

EvenNodes = Annotated[
    int,
    Check("an even integer >= 2, half of each kind", lambda value: value >= 2 and value % 2 == 0),
    Check(f"at most {MAX_NODES}", lambda value: value <= MAX_NODES),
]
NumSteps = Annotated[
    int,
    Check(f"a multiple of {BLOCK}, at least {BLOCK}", lambda v: v >= BLOCK and v % BLOCK == 0),
    Check(f"at most {MAX_STEPS}", lambda value: value <= MAX_STEPS),
]


@dataclasses.dataclass(frozen=True)
class RatesOptions(OutputOptions):
    """Measures how the gradient shrinks with the steps and the nodes."""

    algorithm: tuple[str, ...] = ("sgp", "dpsgd", "allreduce")
    """One or several methods, ALGORITHM or ALGORITHM@TOPOLOGY, by default with the topology of its
    paper."""
    nodes: tuple[EvenNodes, ...] = (4, 8, 16, 32)
    """One or several numbers of nodes n."""
    steps: tuple[NumSteps, ...] = (2**9, 2**11, 2**13, 2**15, 2**17)
    """One or several numbers of steps K, each a run with the learning rate sqrt(n / K)."""
    seeds: PositiveInt = 8
    """Number of seeds, from 0 on: each draws the data of the nodes and the noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "algorithm", "nodes", "steps")
        if min(self.steps) < max(self.nodes):
            raise ValueError(
                "--steps must be at least the number of nodes (theorem 1, eq. 3), got "
                f"{min(self.steps)} steps and {max(self.nodes)} nodes."
            )
        if max(self.nodes) * self.seeds > MAX_MODELS:
            raise ValueError(
                f"--nodes times --seeds must be at most {MAX_MODELS}, got "
                f"{max(self.nodes) * self.seeds}: take fewer."
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(RatesOptions, "experiments.rates", arguments)
        # All of them before the first runs: this raises for what is unknown or impossible.
        simulations = [
            Simulation(method, nodes, options.seeds)
            for method, nodes in itertools.product(options.algorithm, options.nodes)
        ]
        labels = [(one.label, one.nodes.size) for one in simulations]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"--algorithm must be different methods, got {options.algorithm}: leave one out."
            )
        out = results.create_run_dir("rates", options.out, options.overwrite)
        measure_all(options, simulations, out, Console())


def measure_all(
    options: RatesOptions, simulations: Sequence[Simulation], out: Path, console: Console
) -> None:
    """Measures all runs, writes the files, and prints the tables."""
    console.print(
        f"{problem.COORDINATES} coordinates, L = {problem.SMOOTHNESS:g}, sigma^2 = "
        f"{problem.VARIANCE:g}, zeta^2 = {problem.HETEROGENEITY:.3g} at the optimum; "
        f"{options.seeds} seeds; simulated nodes, float32. Results: {out}",
        soft_wrap=True,
    )
    pairs = list(itertools.product(options.nodes, options.steps))
    if outside := sum(not is_in_regime(*pair) for pair in pairs):
        console.print(
            f"{outside} of {len(pairs)} pairs of n and K are below K = n^3: shown, but in no slope."
        )
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
        task = bar.add_task("rates", total=len(simulations) * sum(options.steps), status="")
        for simulation, steps in itertools.product(simulations, options.steps):
            bar.update(task, status=f"{simulation.label}, n = {simulation.nodes.size}, K = {steps}")
            for line in (lines := measure_run(simulation, steps, bar, task)):
                file.write(json.dumps(make_line(simulation, steps, line), allow_nan=False) + "\n")
            file.flush()
            runs.append(make_record(simulation, steps, lines[-1]))
        bar.update(task, status=f"{len(runs)} runs")
    slopes = report.find_slopes(runs)
    environment = {"numpy": np.__version__}
    results.write_summary(out, dataclasses.asdict(options), environment, runs, slopes=slopes)
    report.print_report(console, runs, slopes)


def measure_run(simulation: Simulation, steps: int, bar: Progress, task: TaskID) -> list[Means]:
    """Returns the means at steps that are powers of two, and at the end."""
    kept = []
    for means in simulation.run(steps):
        bar.advance(task, BLOCK)
        blocks = means.step // BLOCK
        if blocks & (blocks - 1) and means.step < steps:
            continue
        if not np.isfinite([means.squared_gradient, means.squared_distance]).all():
            raise FatalError(
                f"the models must be finite, got others within {means.step} steps of "
                f"{simulation.label}: take more --steps, so that the learning rate is smaller."
            )
        kept.append(means)
    return kept


def make_line(simulation: Simulation, steps: int, means: Means) -> Record:
    """Returns a line of `metrics.jsonl`."""
    return {
        "label": simulation.label,
        "nodes": simulation.nodes.size,
        "steps": steps,
        "step": means.step,
        "squared_gradient": float(means.squared_gradient.mean()),
        "squared_distance": float(means.squared_distance.mean()),
    }


def make_record(simulation: Simulation, steps: int, means: Means) -> Record:
    """Returns the object in `runs` of `summary.json`."""
    nodes = simulation.nodes.size
    return {
        "label": simulation.label,
        "algorithm": simulation.algorithm,
        "topology": simulation.topology,
        "nodes": nodes,
        "steps": steps,
        "learning_rate": find_rate(nodes, steps),
        "bound": problem.bound_of_theorem(nodes, steps),
        "is_in_regime": is_in_regime(nodes, steps),
        "squared_gradient": means.squared_gradient.tolist(),
        "squared_distance": means.squared_distance.tolist(),
    }


if __name__ == "__main__":
    main()
