"""Seconds to compile the training step of simulated nodes, by topology and number of nodes.

    python -m experiments.speed local compilation --nodes 8 64 256 1024

All programs that a run by SGP needs, one or one per round, over that of the same step without
gossip. They are traced and compiled from shapes; nothing is trained.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import optax
from rich.table import Table

import gossipjax as gx
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.local.gossip import NodeCounts, Problem
from experiments.training.methods import TOPOLOGIES, make_schedule

REPEATS = 3  # of which the fastest counts


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
    """Options of the measurement of compilation."""

    nodes: NodeCounts = (8, 64, 256, 1024)
    """Number of simulated nodes: one or several numbers."""
    topologies: tuple[str, ...] = tuple(TOPOLOGIES)
    """Names of topologies, as in experiments.image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.nodes and self.topologies):
            raise ValueError("--nodes and --topologies must be one or several, got none.")


def time_compilation(problem: Problem, tx: optax.GradientTransformation) -> tuple[float, int]:
    """The least seconds to trace and compile a training step, and the number of its programs."""
    state = jax.eval_shape(problem.nodes.spmd(tx.init), problem.params)
    steps = gx.TrainStep(problem.gradients, tx, nodes=problem.nodes).canonical_steps(state) or [0]

    def compile_all() -> float:
        jax.clear_caches()
        train_step = gx.TrainStep(problem.gradients, tx, nodes=problem.nodes)
        start = time.perf_counter()
        for step in steps:
            train_step.lower(step, problem.params, state, problem.batch).compile()
        return time.perf_counter() - start

    return min(compile_all() for _ in range(REPEATS)), len(steps)


def measure_case(topologies: Sequence[str], nodes: int) -> list[Record]:
    """The objects in `runs` of a number of nodes."""
    problem = Problem("small_cnn", nodes, 1, is_abstract=True)
    plain, _ = time_compilation(problem, problem.optimizer)
    runs = []
    for topology in topologies:
        try:
            schedule = make_schedule(topology, nodes)
        except ValueError:  # impossible for this number of nodes
            continue
        seconds, programs = time_compilation(
            problem, optax.chain(problem.optimizer, gx.sgp(schedule))
        )
        runs.append(
            {
                "topology": topology,
                "nodes": nodes,
                "rounds": len(schedule.rounds),
                "programs": programs,
                "plain_seconds": plain,
                "seconds": seconds,
                "ratio": seconds / plain,
            }
        )
    return runs


def make_table(runs: Sequence[Record]) -> Table:
    """A row per topology and number of nodes."""
    columns: dict[str, harness.Cell] = {
        "topology": "{topology}",
        "nodes": "{nodes}",
        "rounds": "{rounds}",
        "programs": "{programs}",
        "without": "{plain_seconds:.2f}",
        "with": "{seconds:.2f}",
        "x": "{ratio:.2f}",
    }
    return harness.make_table("Seconds to compile a step with gossip", "", columns, runs)


def make_plan(options: Options) -> harness.Plan:
    """All numbers of nodes."""
    for topology in options.topologies:
        if topology not in TOPOLOGIES:
            make_schedule(topology, min(options.nodes))  # raises
    cases: list[tuple[str, Callable[[], list[Record]]]] = [
        (f"{size} nodes", partial(measure_case, options.topologies, size)) for size in options.nodes
    ]
    return harness.Plan("simulated on one CPU device", cases, make_table)


def measure_compilation(options: Options) -> None:
    """Seconds to compile the training step of simulated nodes, with and without gossip."""
    harness.run_check("compilation", options, partial(make_plan, options))
