"""How fast each topology averages: no training, and the figures of the papers beside ours.

    python -m experiments.averaging

Every node starts from standard normal values `x_i(0)`, and in each round `x <- P x` and `w <- P w`.
The averaging error of the de-biased `z = x / w` is, with the mean of the starts `m`,

    sqrt(sum_i ||z_i - m||^2 / sum_i ||x_i(0) - m||^2).

This is the mathematics of the schedules: dense float64 matrices on the CPU, nothing is exchanged
over a wire. It writes into `--out`: `metrics.jsonl`, a line per topology, number of nodes and round
(`round` 0 is the start) with `error_median`, `error_10` and `error_90` (the 10 % and 90 % quantiles
over the seeds); `summary.json`, with `runs` (a list: one object per topology and number of nodes)
and the two tables of the papers; and `averaging_error.png`.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console

import gossipjax as gx
from experiments import averaging_report, results
from experiments.methods import Topology, schedule
from gossipjax import spectra

Record = dict[str, Any]

VALUES = 100  # numbers that each node starts from
DRAWN = 30  # rounds of a random schedule, at least: fewer might not connect all nodes
PAPER_NODES, PAPER_ROUNDS = 32, 5  # of SGP-18, appendix A
RING_SIZES, RING_ROUNDS = (8, 16, 32, 64), 10  # RAND-20 gives formulas; the sizes are ours


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the averaging experiment."""

    topology: tuple[Topology, ...] = (
        "one_peer_exponential", "complete_cycle", "random_peer_exponential", "random_peer_complete",
        "ring", "random_ring", "exponential", "bipartite_exponential", "base_graph",
    )  # fmt: skip
    """One or several, compared with each other."""
    nodes: tuple[int, ...] = (32,)
    """Number of nodes: one or several, a panel of the plot each."""
    rounds: int = 30
    """Rounds of averaging that are measured."""
    seeds: int = 100
    """Number of seeds, from 0 on: each draws the starting values, and the random topologies."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        for name in ("rounds", "seeds"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name} is at least 1, not {value}.")
        for name, values in (("topology", self.topology), ("nodes", self.nodes)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{name} takes one or several different values, not {values}.")
        if min(self.nodes) < 2:
            raise ValueError(f"--nodes is at least 2, as one node is the average: {self.nodes}.")


def is_random(topology: Topology) -> bool:
    """Whether the topology is drawn from a seed."""
    return topology.startswith("random_")


class Curve(NamedTuple):
    """One topology over so many nodes."""

    topology: Topology
    nodes: int
    first: gx.Schedule
    """That of seed 0; of every seed unless the topology is random."""
    errors: np.ndarray
    """`[seeds, rounds + 1]`, of every seed after every round."""

    def lines(self) -> Iterable[Record]:
        """The lines of `metrics.jsonl`."""
        low, median, high = np.quantile(self.errors, [0.1, 0.5, 0.9], axis=0).tolist()
        for k, (middle, best, worst) in enumerate(zip(median, low, high, strict=True)):
            errors = {"error_median": middle, "error_10": best, "error_90": worst}
            yield {"topology": self.topology, "nodes": self.nodes, "round": k, **errors}

    def summary(self) -> Record:
        """The object in `runs` of `summary.json`. Spectra are of the first seed's schedule."""
        sent = np.count_nonzero(self.first.matrices(), axis=1) - 1
        early = min(PAPER_ROUNDS, self.errors.shape[1] - 1)
        return {
            "topology": self.topology,
            "nodes": self.nodes,
            "peers_per_round": int(sent.max()),
            "rounds_of_a_cycle": self.first.period,
            "spectral_gap_of_a_cycle": spectra.spectral_gap(self.first),
            "rounds_to_exact_average": spectra.rounds_to_exact_average(self.first),
            "early_round": early,
            "error_at_early_round": float(np.median(self.errors[:, early])),
            "error_at_the_end": float(np.median(self.errors[:, -1])),
        }


def averaging_error(of: gx.Schedule, rounds: int, seed: int) -> np.ndarray:
    """The averaging error from this seed's starting values, `[rounds + 1]`: after 0, 1, ... rounds.

    >>> averaging_error(gx.topology.complete(4), 1, seed=0).round(12).tolist()
    [1.0, 0.0]
    """
    # A stream of its own, apart from that of the random topologies.
    x = np.random.default_rng([seed, VALUES]).standard_normal((of.size, VALUES))
    w, mean = np.ones((of.size, 1)), x.mean(axis=0)
    distances = [np.linalg.norm(x - mean)]
    for k in range(rounds):
        matrix = of.round_at(k).matrix
        x, w = matrix @ x, matrix @ w
        distances.append(np.linalg.norm(x / w - mean))
    return np.array(distances) / distances[0]


def measure(topology: Topology, nodes: int, rounds: int, seeds: int) -> Curve:
    """The averaging errors of one topology over all seeds."""

    def draw(seed: int) -> gx.Schedule:
        return schedule(topology, nodes, max(rounds, DRAWN), seed)

    first = draw(0)
    each = (draw(seed) if is_random(topology) else first for seed in range(seeds))
    errors = [averaging_error(of, rounds, seed) for seed, of in enumerate(each)]
    return Curve(topology, nodes, first, np.array(errors))


def sgp18_factors(seeds: int) -> list[Record]:
    """`sigma_2^2` of 5 rounds over 32 nodes (SGP-18, appendix A), the paper's value beside it.

    It bounds the factor on the squared error where rounds are doubly stochastic; where neighbours
    are random they are not, and push-sum's error may shrink less. For random topologies the mean
    over the seeds, and their standard deviation (None for one seed).
    """
    cases: list[tuple[Topology, str, str]] = [
        ("one_peer_exponential", "exponential graph, hops in turn", "0"),
        ("complete_cycle", "complete graph, hops in turn", "about 0.6"),
        ("random_peer_exponential", "exponential graph, random neighbour", "about 0.4"),
        ("random_peer_complete", "complete graph, random neighbour", "about 0.2"),
    ]
    records = []
    for topology, words, paper in cases:
        values = [
            spectra.second_singular_value(
                schedule(topology, PAPER_NODES, DRAWN, seed), PAPER_ROUNDS
            )
            ** 2
            for seed in range(seeds if is_random(topology) else 1)
        ]
        size = {"nodes": PAPER_NODES, "rounds": PAPER_ROUNDS}
        records.append(
            {"topology": topology, "words": words, **size, **_spread(values), "paper": paper}
        )
    return records


def rand20_rings(seeds: int) -> list[Record]:
    """The ring and the randomized ring beside RAND-20, eqs. 5, 6 and 12, for several sizes `L`.

    `second_eigenvalue` is from the matrix, `paper_second_eigenvalue` is eq. 6. The distances are
    spectral norms to the exact average, `||T_1 ... T_k - T_u||_2`, after `k` rounds; `paper_ring`
    is `rho^k` of eqs. 5 and 6, `paper_bound` is that of eq. 12, of the mean.
    """
    records, k = [], RING_ROUNDS
    for size in RING_SIZES:
        ring = gx.topology.ring(size)
        rho = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / size)
        values = [
            spectra.second_singular_value(gx.topology.random_ring(size, k, seed), k)
            for seed in range(seeds)
        ]
        records.append(
            {
                "nodes": size,
                "rounds": k,
                "second_eigenvalue": 1 - spectra.spectral_gap(ring),
                "paper_second_eigenvalue": rho,
                "ring": spectra.second_singular_value(ring, k),
                "paper_ring": rho**k,
                **_spread(values),
                "paper_bound": math.sqrt(size - 1) / math.sqrt(3) ** k,
            }
        )
    return records


def _spread(values: Sequence[float]) -> Record:
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "standard_deviation": deviation}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, and reports."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.averaging",
            description="How fast each topology averages: no training.",
            args=arguments,
        )
        for topology, nodes in itertools.product(options.topology, options.nodes):
            schedule(topology, nodes, max(options.rounds, DRAWN), seed=0)  # or say what is wrong
        out = results.claim_folder("averaging", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        measure_all(options, out, Console())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print(f"interrupted; {out} holds what was measured", file=sys.stderr)
        sys.exit(130)


def measure_all(options: Options, out: Path, console: Console) -> None:
    """Measures one topology after another; writes the files, the plot and the tables."""
    jobs = list(itertools.product(options.nodes, options.topology))
    console.print(
        f"{len(options.topology)} topologies, {options.rounds} rounds, {options.seeds} seeds, "
        f"{VALUES} values per node; float64 matrices. Results: {out}",
        soft_wrap=True,
    )
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.progress_bar(console) as bar:
        task = bar.add_task("averaging", total=len(jobs) + 1, status="")
        for nodes, topology in jobs:
            bar.update(task, status=f"{topology}, {nodes} nodes")
            curve = measure(topology, nodes, options.rounds, options.seeds)
            for line in curve.lines():
                file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            runs.append(curve.summary())
            bar.advance(task)
        bar.update(task, status="the papers' tables")
        factors, rings = sgp18_factors(options.seeds), rand20_rings(options.seeds)
        bar.update(task, advance=1, status=f"{len(jobs)} curves")
    summary = {
        "options": dataclasses.asdict(options),
        "environment": {"numpy": np.__version__, "gossipjax": gx.__version__},
        "runs": runs,
        "sgp18_appendix_a": factors,
        "rand20_rings": rings,
    }
    text = json.dumps(summary, indent=2, default=str, allow_nan=False)
    (out / "summary.json").write_text(f"{text}\n")
    averaging_report.write_report(out, console)


if __name__ == "__main__":
    main()
