"""Studies of this project: outer momentum, uneven data on a ring, and nodes that lie."""

import itertools
import math
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
    read_section,
    read_table,
)
from experiments.report.tuning import Tuned, claim_best, list_tuned
from experiments.results import Record, read_lines
from experiments.runner import Result, Run

MISSING = Result(status="missing")

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
    rows = list_rows(results.get(OUTER, MISSING).runs)
    best = {(row["every"], row["momentum"]): row for row in pick_best(rows)}
    figures: dict[str, Any] = {name: {} for name in ("gains", "effective", "naive", "diloco")}
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
        read_claims(OUTER, figures), [read_table(OUTER, table)], [drawn] if rows else []
    )


OUTER_SECTION = read_section(name=OUTER, list_runs=list_outer_runs, find=find_outer)

# Uneven data on a ring of 16

AVERAGE, NODES = "test_accuracy_average_model", "test_accuracy_nodes"
UNEVEN = """--dataset mnist5k --model small_cnn --normalization group --nodes 16
--batch-size-per-node 16 --placement vmap --dirichlet-alpha 0.1 --epochs 20 --evaluate-every 4
--evaluate-nodes --log-every 100"""


def make_method(name: str, algorithm: str, rate: float, *options: str) -> Tuned:
    """Returns a method of the ring, by the mean accuracy of its nodes."""
    return Tuned(f"gut-{name}", "image", (*UNEVEN.split(), *options), algorithm, rate, NODES)


METHODS = {
    "AllReduce": make_method("allreduce", "allreduce", 0.05),
    "D-PSGD": make_method("dpsgd", "dpsgd-adapt-then-combine@ring", 0.05),
    "QG": make_method("qg", "dpsgd-adapt-then-combine@ring", 0.05, "--momentum", "quasi-global"),
    "gradient tracking": make_method(
        "gradient-tracking", "gradient-tracking@ring", 0.2, "--optimizer", "sgd"
    ),
    "momentum tracking": make_method("momentum-tracking", "gradient-tracking@ring", 0.05),
    "GUT": make_method("gut", "experiments.uneven:gut@ring", 0.05),
    "DecentLaM": make_method(
        "decentlam", "experiments.uneven:decentlam@ring", 0.05, "--optimizer", "sgd"
    ),
    "Scaffnew": make_method("scaffnew", "experiments.uneven:scaffnew@ring", 0.05),
}
POINT_SPREAD = 1.0  # standard deviation of a seed, in points


def list_uneven_runs(scale: Scale) -> list[Run]:
    """A call for each method and rate; when quick, D-PSGD and GUT for two epochs."""
    if not scale.is_quick:
        return list_tuned(METHODS.values(), False)
    options = ("--epochs", "2", "--max-steps", "8")
    runs = (METHODS[name].make_run(1.0, 1) for name in ("D-PSGD", "GUT"))
    return [run._replace(arguments=(*run.arguments, *options)) for run in runs]


def find_uneven(scale: Scale, results: Results) -> Findings:
    """Compares the methods by the mean accuracy of the nodes."""
    found = {title: measure_method(results, method) for title, method in METHODS.items()}
    nodes = {METHODS[title].name.removeprefix("gut-"): found[title][2] for title in METHODS}
    behind = {title: nodes["allreduce"] - found[title][2] for title in METHODS}
    behind.pop("AllReduce")
    claims = read_claims("gut", nodes | {"behind": behind})
    if not scale.is_quick:
        claims.append(claim_best(METHODS, results, 1, "+.3f"))
    rows = [
        (title, f"{METHODS[title].rate:g}", *(f"{x:.1f}" for x in samples))
        for title, samples in found.items()
    ]
    return Findings(claims, [read_table("gut", rows)])


def measure_method(results: Results, method: Tuned) -> list[Sample]:
    """Returns, in per cent, the average model's accuracy, last and best; the nodes' mean accuracy,
    last and best; the worst node's; and last the distance of the nodes, which is no per cent."""
    place = method.find_place()
    result = results.get(place.run, MISSING)
    metrics = result.folder and result.folder / "metrics.jsonl"
    lines = read_lines(metrics) if metrics and metrics.is_file() else []
    columns: list[list[float]] = [[], [], [], [], [], []]
    for run in place.find_runs(results):
        curve = [line for line in lines if line["run"] == run["run"]]
        averages = [line[AVERAGE] for line in curve if AVERAGE in line]
        means = [float(np.mean(line[NODES])) for line in curve if NODES in line]
        last = float(np.mean(run[NODES]))
        values = (run[AVERAGE], max(averages), last, max([*means, last]), min(run[NODES]))
        for column, value in zip(columns, (*(100 * x for x in values), 0.0), strict=True):
            column.append(value)
        columns[-1][-1] = run["consensus_distance"]
    return [Sample(tuple(column), result.status, POINT_SPREAD) for column in columns]


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
        for run in results.get(LIARS, MISSING).runs
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
    for run in results.get(ASYNCHRONOUS, MISSING).runs:
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
