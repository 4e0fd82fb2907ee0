"""Measures how fast each topology averages, without training, and compares it with the papers.

    python -m experiments.averaging

Every node starts from standard normal values `x_i(0)`, and in each round `x <- P x` and `w <- P w`.
The averaging error of the de-biased `z = x / w` is, with the mean of the starts `m`,

    sqrt(sum_i ||z_i - m||^2 / sum_i ||x_i(0) - m||^2).

This is the mathematics of the schedules: dense float64 matrices on the CPU, without any exchange of
messages. The program writes `metrics.jsonl` into `--out`, with a line per topology, number of nodes
and round, of which 0 is the start, and `summary.json`, in which `sgp18_appendix_a` and
`rand20_rings` repeat figures of the papers, which `experiments.report` compares.

References:
  Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", submission to ICLR 2019,
  arXiv:1811.10792v1 (SGP-18).
  Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training", ICASSP
  2020, arXiv:2002.01119 (RAND-20).
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.options import (
    Check,
    OutputOptions,
    PositiveInt,
    parse_arguments,
    require_different,
)
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.tables import Cell, make_table
from experiments.training.topologies import TOPOLOGIES, make_schedule

if TYPE_CHECKING:
    Topology = str
else:
    Topology = tyro.extras.literal_type_from_choices(tuple(TOPOLOGIES))

MAX_NODES = 4096  # a dense matrix of 4096 nodes has 134 MB
MAX_ROUNDS = 10**6
MAX_SEEDS = 10**6

AtLeastTwo = Annotated[
    int,
    Check("an integer >= 2", lambda value: value >= 2),
    Check(f"at most {MAX_NODES}, for dense matrices", lambda value: value <= MAX_NODES),
]
NumRounds = Annotated[
    PositiveInt, Check(f"at most {MAX_ROUNDS}", lambda value: value <= MAX_ROUNDS)
]
NumSeeds = Annotated[PositiveInt, Check(f"at most {MAX_SEEDS}", lambda value: value <= MAX_SEEDS)]

VALUES_PER_NODE = 100
MIN_RANDOM_ROUNDS = 30  # of a random schedule: fewer might not connect all nodes
PAPER_TOPOLOGIES: tuple[Topology, ...] = (
    "one_peer_exponential", "complete_cycle", "random_peer_exponential", "random_peer_complete",
)  # fmt: skip
PAPER_NODES = 32  # of SGP-18, appendix A
PAPER_ROUNDS = 5
RING_SIZES = (8, 16, 32, 64)  # RAND-20 gives formulas; the sizes are ours
RING_ROUNDS = 10
ROUNDING_ERROR = 1e-15  # a smaller error is only float64 rounding


@dataclasses.dataclass(frozen=True)
class AveragingOptions(OutputOptions):
    """Measures how fast each topology averages, without training."""

    topology: tuple[Topology, ...] = (
        "one_peer_exponential", "complete_cycle", "random_peer_exponential", "random_peer_complete",
        "ring", "random_ring", "exponential", "bipartite_exponential", "base_graph",
    )  # fmt: skip
    """One or several topologies to compare."""
    nodes: tuple[AtLeastTwo, ...] = (32,)
    """One or several numbers of nodes."""
    rounds: NumRounds = 30
    """Rounds of averaging."""
    seeds: NumSeeds = 100
    """Number of seeds, from 0 on: each draws the starting values and the random topologies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "topology", "nodes")


def is_random(topology: Topology) -> bool:
    """Whether the topology depends on the seed."""
    return topology.startswith("random_")


class Curve(NamedTuple):
    """The averaging errors of one topology over one number of nodes."""

    topology: Topology
    nodes: int
    schedule: gx.Schedule  # of seed 0, and of every seed unless the topology is random
    errors: np.ndarray  # `[seeds, rounds + 1]`: of every seed after 0, 1, ... rounds

    def lines(self) -> Iterable[Record]:
        """Yields the lines of `metrics.jsonl`."""
        quantiles = np.quantile(self.errors, [0.1, 0.5, 0.9], axis=0).T.tolist()
        for round_, (low, median, high) in enumerate(quantiles):
            yield {
                "topology": self.topology,
                "nodes": self.nodes,
                "round": round_,
                "error_median": median,
                "error_p10": low,
                "error_p90": high,
            }

    def summary(self) -> Record:
        """Returns the object in `runs` of `summary.json`, with the spectra of seed 0.

        `error_after_5_rounds` and `final_error` are medians over the seeds; the former is None if
        there were fewer rounds.
        """
        peers = np.count_nonzero(self.schedule.matrices(), axis=1) - 1
        medians = np.median(self.errors, axis=0).tolist()
        return {
            "topology": self.topology,
            "nodes": self.nodes,
            "peers_per_round": int(peers.max()),
            "period": self.schedule.period,
            "spectral_gap_per_round": gx.topology.spectral_gap(self.schedule, per_round=True),
            "rounds_to_exact_average": gx.topology.rounds_to_exact_average(self.schedule),
            "error_after_5_rounds": medians[5] if len(medians) > 5 else None,
            "final_error": medians[-1],
        }


def averaging_error(schedule: gx.Schedule, rounds: int, seed: int) -> np.ndarray:
    """Returns the averaging error of a seed's values after 0, 1, ... rounds, `[rounds + 1]`.

    >>> averaging_error(gx.topology.complete(4), 1, seed=0).round(12).tolist()
    [1.0, 0.0]
    """
    # A second number in the seed, so that random topologies draw from another stream.
    rng = np.random.default_rng([seed, VALUES_PER_NODE])
    x = rng.standard_normal((schedule.size, VALUES_PER_NODE))
    w = np.ones((schedule.size, 1))
    mean = x.mean(axis=0)
    distances = [np.linalg.norm(x - mean)]
    for step in range(rounds):
        matrix = schedule.round_at(step).matrix
        x = matrix @ x
        w = matrix @ w
        distances.append(np.linalg.norm(x / w - mean))
    return np.array(distances) / distances[0]


def measure_curve(topology: Topology, nodes: int, rounds: int, seeds: int) -> Curve:
    """Measures the averaging errors of one topology for all seeds."""
    random_rounds = max(rounds, MIN_RANDOM_ROUNDS)
    first = make_schedule(topology, nodes, random_rounds, seed=0)
    errors = []
    for seed in range(seeds):
        schedule = first
        if is_random(topology):
            schedule = make_schedule(topology, nodes, random_rounds, seed)
        errors.append(averaging_error(schedule, rounds, seed))
    return Curve(topology, nodes, first, np.array(errors))


def compute_sgp18_factors(seeds: int) -> list[Record]:
    """Computes `sigma_2^2` of 5 rounds over 32 nodes, with the values of SGP-18, appendix A.

    It bounds the factor on the squared error if rounds are doubly stochastic. Rounds with random
    neighbors are not, and push-sum's error may shrink less. For random topologies the records have
    the mean over the seeds and the standard deviation (None for one seed).
    """
    records = []
    for topology in PAPER_TOPOLOGIES:
        factors = []
        for seed in range(seeds if is_random(topology) else 1):
            schedule = make_schedule(topology, PAPER_NODES, MIN_RANDOM_ROUNDS, seed)
            factors.append(gx.topology.second_singular_value(schedule, PAPER_ROUNDS) ** 2)
        deviation = float(np.std(factors, ddof=1)) if len(factors) > 1 else None
        mean = float(np.mean(factors))
        records.append({"topology": topology, "mean": mean, "standard_deviation": deviation})
    return records


def compute_rand20_rings(seeds: int) -> list[Record]:
    """Computes the ring and the randomized ring, and the same by RAND-20, eqs. 6 and 12.

    Distances are spectral norms of the difference to the exact average, `||T_1 ... T_k - T_u||_2`,
    after `k` rounds, means of the randomized ring over the seeds, and eq. 12's bounds on them.
    """
    k = RING_ROUNDS
    records = []
    for size in RING_SIZES:
        ring = gx.topology.ring(size)
        rho = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / size)
        distances = np.array(
            [_measure_distances(gx.topology.random_ring(size, k, seed), k) for seed in range(seeds)]
        )
        bounds = [math.sqrt(size - 1) / math.sqrt(3) ** (1 + round_) for round_ in range(k)]
        records.append(
            {
                "nodes": size,
                "second_eigenvalue": 1 - gx.topology.spectral_gap(ring),
                "paper_second_eigenvalue": rho,
                "means_by_round": distances.mean(axis=0).tolist(),
                "paper_bounds_by_round": bounds,
            }
        )
    return records


def _measure_distances(schedule: gx.Schedule, rounds: int) -> list[float]:
    """The distances to the exact average after 1, 2, ... rounds, in the spectral norm."""
    return [gx.topology.second_singular_value(schedule, k) for k in range(1, rounds + 1)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(AveragingOptions, "experiments.averaging", arguments)
        for topology, nodes in itertools.product(options.topology, options.nodes):
            make_schedule(topology, nodes, max(options.rounds, MIN_RANDOM_ROUNDS))  # or raises
        out = results.create_run_dir("averaging", options.out, options.overwrite)
        measure_all(options, out, Console())


def measure_all(options: AveragingOptions, out: Path, console: Console) -> None:
    """Measures all topologies, writes the files, and prints the table."""
    cases = list(itertools.product(options.nodes, options.topology))
    console.print(
        f"{len(options.topology)} topologies, {options.rounds} rounds, {options.seeds} seeds, "
        f"{VALUES_PER_NODE} values per node; float64 matrices. Results: {out}",
        soft_wrap=True,
    )
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
        task = bar.add_task("averaging", total=len(cases) + 1, status="")
        for nodes, topology in cases:
            bar.update(task, status=f"{topology}, {nodes} nodes")
            curve = measure_curve(topology, nodes, options.rounds, options.seeds)
            for line in curve.lines():
                file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            runs.append(curve.summary())
            bar.advance(task)
        bar.update(task, status="figures of the papers")
        factors = compute_sgp18_factors(options.seeds)
        rings = compute_rand20_rings(options.seeds)
        bar.update(task, advance=1, status=f"{len(cases)} curves")
    results.write_summary(
        out,
        dataclasses.asdict(options),
        {"numpy": np.__version__},
        runs,
        sgp18_appendix_a=factors,
        rand20_rings=rings,
    )
    console.print(make_topology_table(runs))


def make_topology_table(runs: Sequence[Record]) -> Table:
    """Makes a table of the list `runs` of `summary.json`."""
    columns: dict[str, Cell] = {
        "topology": "{topology}",
        "\nnodes": "{nodes}",
        "\npeers": "{peers_per_round}",
        "\nperiod": "{period}",
        "gap per\nround": "{spectral_gap_per_round:.4f}",
        "exact\nafter": lambda run: f"{run['rounds_to_exact_average'] or 'never'}",
        "error\nafter 5": lambda run: _format_error(run["error_after_5_rounds"]),
        "final\nerror": lambda run: _format_error(run["final_error"]),
    }
    caption = "errors: medians over the seeds; all others: seed 0"
    return make_table("Topologies", caption, columns, runs)


def _format_error(error: float | None) -> str:
    if error is None:
        return "-"
    return f"{error:.1e}" if error > ROUNDING_ERROR else f"<{ROUNDING_ERROR:.0e}"


if __name__ == "__main__":
    main()
