"""What the runs show: from the times and losses of every node's steps to a row of the table."""

import statistics
from collections.abc import Sequence

import numpy as np

from experiments.results import Record
from experiments.speed.modelled.stragglers import simulate_run
from experiments.speed.stragglers.problem import BATCH_SIZE_PER_NODE
from experiments.speed.stragglers.setting import Setting
from experiments.speed.stragglers.slowness import NONE, compute_ideal_ratio, draw_factors
from experiments.training.asynchronous import ASYNCHRONOUS


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
    algorithm: str, slowness: str, setting: Setting, records: Sequence[Record]
) -> list[Record]:
    """The lines of `metrics.jsonl`: one for every N steps, in the order in which they ended."""
    ends, losses = sort_steps(records)
    lines = []
    for step in range(1, setting.steps + 1):
        chosen = slice((step - 1) * setting.nodes, step * setting.nodes)
        lines.append(
            {
                "algorithm": algorithm,
                "slowness": slowness,
                "step": step,
                "examples": step * setting.nodes * BATCH_SIZE_PER_NODE,
                "seconds": float(ends[chosen][-1]),
                "loss": float(losses[chosen].mean()),
            }
        )
    return lines


def summarize_run(
    algorithm: str, slowness: str, setting: Setting, records: Sequence[Record]
) -> Record:
    """The object in `runs` of one run, without its ratio to another run."""
    ends, _ = sort_steps(records)
    factors = draw_factors(slowness, setting.nodes, setting.steps)
    is_lockstep = algorithm not in ASYNCHRONOUS
    ideal = compute_ideal_ratio(factors, is_lockstep)
    examples_per_second = BATCH_SIZE_PER_NODE * count_steps_per_second(records, is_lockstep)
    limit = ideal * setting.full_examples_per_second
    steps = [len(record["ends"]) for record in records]
    modelled = simulate_run(algorithm, slowness, setting)
    return {
        "algorithm": algorithm,
        "slowness": slowness,
        **setting._asdict(),
        "seconds": float(ends[setting.nodes * setting.steps - 1]),
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
        **{name: sum_counts(records, name) for name in ("sent", "kept")},
        "staleness": average_counts(records, "staleness"),
    }


def sum_counts(records: Sequence[Record], name: str) -> int | None:
    """Sum over the nodes; None in lockstep."""
    return None if records[0][name] is None else sum(record[name] for record in records)


def average_counts(records: Sequence[Record], name: str) -> float | None:
    """Mean over the nodes; None in lockstep."""
    total = sum_counts(records, name)
    return None if total is None else total / len(records)


def add_ratios(runs: Sequence[Record]) -> None:
    """Adds to each run the ratios to the run of its algorithm without slow nodes; None without one.

    `ratio_to_none` is that of the examples per second, and `ratio_to_ideal` what it is of the ratio
    that it would be if only the computation took time.
    """
    without = {run["algorithm"]: run for run in runs if run["slowness"] == NONE}
    for run in runs:
        run["ratio_to_none"] = None
        run["ratio_to_ideal"] = None
        if run["algorithm"] in without:
            fastest = without[run["algorithm"]]["examples_per_second"]
            run["ratio_to_none"] = run["examples_per_second"] / fastest
            run["ratio_to_ideal"] = run["ratio_to_none"] / run["ideal_ratio_to_none"]
