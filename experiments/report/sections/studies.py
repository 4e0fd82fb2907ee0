"""Studies of this project: outer momentum, uneven data on a ring, and nodes that lie."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.outer_momentum import draw, list_rows, pick_best
from experiments.report.section import (
    Estimate,
    Figure,
    Findings,
    Results,
    Sample,
    Scale,
    exact,
    read_claims,
    read_records,
    read_section,
    read_table,
)
from experiments.results import Record
from experiments.runner import Run

# Outer momentum, if nodes average often

OUTER = "outer-momentum"


def list_outer_runs(scale: Scale) -> list[Run]:
    """One call; when quick, of one H and few rates."""
    images = ("--fashion-mnist", f"{scale.fashion_mnist}") if scale.fashion_mnist else ()
    small = "--every 16 --momentum 0 0.9 --outer-rate 0.25 1 --steps 64 --seed 0"
    return [Run(OUTER, "outer_momentum", tuple(small.split()) if scale.is_quick else images)]


def find_outer(scale: Scale, results: Results) -> Findings:
    """Compares the best rates of the momentums."""
    del scale
    rows = list_rows(read_records(results, OUTER))
    best = {(row["every"], row["momentum"]): row for row in pick_best(rows)}
    figures: dict[str, Any] = {
        name: {} for name in ("gains", "effective", "naive", "limits", "diloco")
    }
    for (every, momentum), row in best.items():
        if (every, 0.0) not in best:
            continue
        plain = best[every, 0.0]
        loss = Sample(tuple(plain["loss"]))
        title = f"H {every}, momentum {momentum:g}"
        if momentum:
            figures["gains"][title] = loss - Sample(tuple(row["loss"]))
            ratio = row["effective"] / plain["effective"]
            figures["effective"][title] = exact(math.log2(ratio))
            ratio = row["outer_rate"] / (1 - momentum) / plain["outer_rate"]
            figures["naive"][title] = exact(math.log2(ratio))
            ratio = find_limit(rows, every, momentum) / find_limit(rows, every, 0.0)
            figures["limits"][title] = exact(math.log2(ratio))
        if momentum == 0.9:
            tries = [r for r in rows if (r["every"], r["momentum"]) == (every, momentum)]
            near = min(tries, key=lambda r: abs(math.log(r["outer_rate"] / 0.7)))
            figures["diloco"][f"H {every}"] = Sample(tuple(near["loss"])) - loss
    table = [
        (
            f"{row['every']}",
            f"{row['momentum']:g}",
            f"{row['outer_rate']:.3g}",
            f"{row['cosine']:.2f}",
            f"{row['effective']:.2f}",
            f"{Sample(tuple(row['loss'])):.4f}",
        )
        for row in best.values()
    ]
    drawn = Figure(
        OUTER,
        "Loss of the average model over the outer rate, and over the effective rate with the "
        "measured cosine of successive outer gradients; means of three seeds.",
        partial(draw, rows),
    )
    return Findings(
        read_claims(OUTER, figures),
        [read_table(OUTER, table or [["-"] * 6])],
        [drawn] if rows else [],
    )


def find_limit(rows: Sequence[Record], every: int, momentum: float) -> float:
    """Returns the largest effective rate of a cell whose loss is within 0.1 of the cell's best."""
    cell = [row for row in rows if (row["every"], row["momentum"]) == (every, momentum)]
    losses = [float(np.mean(row["loss"])) for row in cell]
    near = (row for row, loss in zip(cell, losses, strict=True) if loss < min(losses) + 0.1)
    return max(row["effective"] for row in near)


OUTER_SECTION = read_section(name=OUTER, list_runs=list_outer_runs, find=find_outer)

# Uneven data on a ring of 16

UNEVEN = """--dataset mnist5k --model small_cnn --normalization group --nodes 16
--batch-size-per-node 16 --placement vmap --epochs 10 --evaluate-every 2 --log-every 50"""
RATES = "--rates 0.05 0.1 --dirichlet-alpha 0.1 --jobs 1 --topology ring"
PLAIN_RATES = "--rates 0.2 0.4 --dirichlet-alpha 0.1 --jobs 1 --topology ring"
DPSGD = "dpsgd-adapt-then-combine"
TRACKING = "gradient-tracking"
OWN = "experiments.uneven"
CALLS = {  # name -> what is compared, and how its nodes train
    "gut-momentum": (
        f"{RATES} --algorithm {DPSGD} {TRACKING} {OWN}:gut {OWN}:scaffnew",
        "--optimizer nesterov",
    ),
    "gut-allreduce": (RATES.replace(" --topology ring", " --algorithm allreduce"), ""),
    "gut-qg": (f"{RATES} --algorithm {DPSGD} --momentum quasi-global", ""),
    "gut-decentlam": (f"{RATES} --algorithm {OWN}:decentlam", "--optimizer sgd"),
    "gut-plain": (f"{PLAIN_RATES} --algorithm {TRACKING}", "--optimizer sgd"),
}
METHODS = {  # title -> (call, algorithm)
    "AllReduce": ("gut-allreduce", "allreduce"),
    "D-PSGD": ("gut-momentum", DPSGD),
    "QG": ("gut-qg", DPSGD),
    "gradient tracking, SGD": ("gut-plain", TRACKING),
    "momentum tracking": ("gut-momentum", TRACKING),
    "GUT": ("gut-momentum", f"{OWN}:gut"),
    "DecentLaM": ("gut-decentlam", f"{OWN}:decentlam"),
    "Scaffnew": ("gut-momentum", f"{OWN}:scaffnew"),
}
COLUMNS = (
    *("values", "average_best", "nodes_mean", "nodes_worst", "consensus_distance"),
    "sent_bytes",
)
POINT_SPREAD = 1.0  # standard deviation of a seed, in points


def list_uneven_runs(scale: Scale) -> list[Run]:
    """Calls of `compare`, which chooses the rates; when quick, GUT for 8 steps."""
    if scale.is_quick:
        small = f"--algorithm {OWN}:gut --topology ring --dirichlet-alpha 0.1 --seed 0"
        calls = {"gut-momentum": (f"{small} --jobs 1", "--max-steps 8")}
    else:
        calls = CALLS
    return [
        Run(name, "compare", (*options.split(), "--", *UNEVEN.split(), *more.split()))
        for name, (options, more) in calls.items()
    ]


def find_uneven(scale: Scale, results: Results) -> Findings:
    """Compares the methods by the mean accuracy of the nodes."""
    del scale
    cells = {title: find_cell(results, *place) for title, place in METHODS.items()}
    nodes = {title: read_cell(cell, "nodes_mean") for title, cell in cells.items()}
    behind = {title: nodes["AllReduce"] - nodes[title] for title in METHODS}
    behind.pop("AllReduce")
    rows = []
    for title, cell in cells.items():
        rate = f"{cell['rate']:g}" if cell.get("rate") else "-"
        found = [read_cell(cell, name) for name in COLUMNS]
        found[-1] = found[-1]._replace(values=tuple(x / 1e6 for x in found[-1].values))
        specs = (".1f", ".1f", ".1f", ".1f", ".3f", ".0f")
        texts = (f"{x:{spec}}" for x, spec in zip(found, specs, strict=True))
        rows.append((title, rate, *texts))
    return Findings(read_claims("gut", nodes | {"behind": behind}), [read_table("gut", rows)])


def find_cell(results: Results, call: str, algorithm: str) -> Record:
    """Returns what `compare` has written of an algorithm; nothing if it has not finished."""
    runs = read_records(results, call)
    return next((run for run in runs if run["row"].startswith(algorithm)), {})


def read_cell(cell: Record, name: str) -> Sample:
    """Returns the values of the seeds by a name of `compare`; "values" are of its metric."""
    values = cell.get(name, ()) if name == "values" else cell.get("seeds", {}).get(name, ())
    return Sample(tuple(values), single_spread=POINT_SPREAD)


UNEVEN_SECTION = read_section(name="gut", list_runs=list_uneven_runs, find=find_uneven)

# Nodes that lie

LIARS = "liars"
ASYNCHRONOUS = "liars-asynchronous"
RULES = {
    "average": "average",
    "ClippedGossip": "ClippedGossip",
    "ClippedSum": "CS+",
    "NearestNeighbors": "NNA",
    "TrimmedMean": "trimmed mean",
    "CoordinateMedian": "median of coordinates",
}
LIES = ("sign flip", "alie", "inner product", "dissensus")
LIARS_SPREAD = 1.0  # points, of one seed


def list_liars_runs(scale: Scale) -> list[Run]:
    """Simulated nodes by rules and lies, and asynchronous nodes with and without `clip`."""
    graph = ("--graph", "two worlds")
    if scale.is_quick:
        small = "--honest 4 --liars 1 --steps 40 --seeds 1 --rule average CoordinateMedian"
        return [Run(LIARS, "liars", (*graph, *small.split(), "--attack", "none", "sign flip"))]
    cases = ("--case", "honest", "shouts", "sign flip", "noise")
    clips = ("--algorithm", "sgp", "--clip", "0", "1")
    return [
        Run(LIARS, "liars", graph),
        Run(ASYNCHRONOUS, "asynchronous_liars", (*cases, *clips)),
    ]


def find_liars(scale: Scale, results: Results) -> Findings:
    """Compares the worst honest nodes under lies with those without."""
    del scale
    worst = {
        f"{run['rule']}/{run['attack']}": make_sample(run, "worst_accuracy", 100)
        for run in read_records(results, LIARS)
    }

    def list_losses(*rules: str) -> dict[str, Estimate]:
        pairs = itertools.product(rules, LIES)
        return {
            f"{RULES[rule]}, {lie}": get("average", "none") - get(rule, lie) for rule, lie in pairs
        }

    def get(rule: str, lie: str) -> Sample:
        return worst.get(f"{rule}/{lie}", Sample())

    figures: dict[str, Any] = dict(worst)
    figures["resist"] = list_losses("ClippedGossip", "ClippedSum", "NearestNeighbors")
    figures["coordinates"] = list_losses("TrimmedMean", "CoordinateMedian")
    figures["nna"] = {lie: get("ClippedSum", lie) - get("NearestNeighbors", lie) for lie in LIES}
    figures["price"] = {RULES[rule]: get("average", "none") - get(rule, "none") for rule in RULES}
    figures["clipping"] = {}
    for run in read_records(results, ASYNCHRONOUS):
        if run["case"] != "honest":
            mean = float(np.mean(run["mean"]))
            is_on = run["clip"] > 0
            title = f"{run['case']}, {'less 80' if is_on else '60 less'}"
            figures["clipping"][title] = exact(mean - 80 if is_on else 60 - mean)
    rows = [
        (title, *(f"{get(rule, lie):.1f}" for lie in ("none", *LIES)))
        for rule, title in RULES.items()
    ]
    return Findings(read_claims(LIARS, figures), [read_table(LIARS, rows)])


def make_sample(run: Record, field: str, factor: float) -> Sample:
    """Returns the values of all seeds of a cell."""
    return Sample(tuple(factor * value for value in run[field]), single_spread=LIARS_SPREAD)


LIARS_SECTION = read_section(name=LIARS, list_runs=list_liars_runs, find=find_liars)
