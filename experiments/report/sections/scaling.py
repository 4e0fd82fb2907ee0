"""A thousand nodes: what gossip costs against AllReduce, graph by graph, and what theory says."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.plots import choose_colors
from experiments.report.section import (
    Estimate,
    Figure,
    Findings,
    Results,
    Sample,
    Scale,
    Table,
    read_claims,
    read_section,
    read_table,
)
from experiments.results import Record
from experiments.runner import Run

BATCHES = {"per node": "8 images a node and step", "total": "2,048 images a step, all together"}
NODES = (16, 64, 256, 1024)
LOSS_SPREAD = 0.006  # standard deviation of a seed
DRAWN = {  # (method, graph) -> title
    ("allreduce", "none"): "AllReduce",
    ("sgp", "exponential"): "SGP, exponential",
    ("sgp", "torus"): "SGP, torus",
    ("sgp", "base"): "SGP, base graph",
    ("sgp", "one-peer"): "SGP, one-peer exponential",
    ("sgp", "ring"): "SGP, ring",
    ("1-osgp", "one-peer"): "1-OSGP, one-peer exponential",
    ("local-sgd", "none"): "averages every 16 steps",
    ("sgp-every-H", "one-peer"): "SGP every 16 steps, one-peer",
}
DASHED = ("1-osgp", "local-sgd", "sgp-every-H")


def list_runs(scale: Scale) -> list[Run]:
    """Three calls for each way to choose batches; when quick, one over 8 nodes."""
    if scale.is_quick:
        small = "--nodes 8 --steps 32 --seed 0 --total-batch-size 128 --batch total --graph ring"
        return [Run("scaling-quick", "scaling", (*small.split(), "--method", "allreduce", "sgp"))]
    images = ("--fashion-mnist", f"{scale.fashion_mnist}") if scale.fashion_mnist else ()
    runs = []
    for batch in BATCHES:
        common = (*images, "--batch", batch, "--method", "allreduce")
        parts = {
            "": ("outer", "dpsgd", "sgp"),
            "-late": ("1-osgp", "sgp-every-H", "--graph", "ring", "one-peer", "base"),
            "-local": ("local-sgd",),
        }
        name = f"scaling-{batch.replace(' ', '-')}"
        runs += [Run(name + end, "scaling", (*common, *part)) for end, part in parts.items()]
    return runs


def find_records(results: Results) -> dict[str, Record]:
    """Returns what was measured, by `batch/method/graph/nodes`."""
    found: dict[str, Record] = {}
    for result in results.values():
        for run in result.runs:
            name = "/".join(f"{run[key]}" for key in ("batch", "method", "graph", "nodes"))
            found.setdefault(name, run)
    return found


def find(scale: Scale, results: Results) -> Findings:
    """Compares losses over the nodes."""
    records = find_records(results)
    losses = {
        name: Sample(tuple(run["loss"]), single_spread=LOSS_SPREAD)
        for name, run in records.items()
        if None not in run["loss"]
    }

    def get(batch: str, method: str, graph: str, nodes: int) -> Sample:
        return losses.get(f"{batch}/{method}/{graph}/{nodes}", Sample())

    large = list(itertools.product(BATCHES, (NODES[1], NODES[-1])))
    figures: dict[str, Any] = dict(losses)
    gain = get("per node", "allreduce", "none", 16) - get("per node", "allreduce", "none", 1024)
    ours = get("per node", "sgp", "exponential", 16) - get("per node", "sgp", "exponential", 1024)
    figures["half"] = {"": ours - gain.halve()}
    sgp = {
        (graph, *place): get(place[0], "sgp", graph, place[1])
        for graph, place in itertools.product(GRAPHS, large)
    }

    def compare(*pairs: tuple[str, str]) -> dict[str, Estimate]:
        return {
            f"{first} less {second}, {batch}, {n}": sgp[first, batch, n] - sgp[second, batch, n]
            for (first, second), (batch, n) in itertools.product(pairs, large)
        }

    figures["static"] = compare(("ring", "torus"), ("torus", "exponential"))
    figures["varying"] = compare(("torus", "one-peer"))
    figures["one message"] = compare(("ring", "one-peer"), ("ring", "base"))
    figures["total"] = {
        f"{n} nodes": get("total", "sgp", "exponential", n) - get("total", "allreduce", "none", n)
        for n in NODES
    }
    figures["order"] = {
        f"{graph}, {batch}": get(batch, "dpsgd", graph, 1024) - sgp[graph, batch, 1024]
        for graph, batch in itertools.product(GRAPHS, BATCHES)
    }
    figures["rarely"] = {}
    for batch in BATCHES:
        rarely = get(batch, "sgp-every-H", "one-peer", 1024)
        cost = rarely - sgp["one-peer", batch, 1024]
        figures["rarely"][f"cost less 0.05, {batch}"] = Estimate(*(x - 0.05 for x in cost))
        exact = rarely - get(batch, "local-sgd", "none", 1024)
        figures["rarely"][f"gossip less exact, {batch}"] = exact
    drawn = Figure(
        "scaling",
        "Loss of the average model on the test images after 256 steps, mean and standard deviation "
        "of three seeds. A perceptron on Fashion-MNIST, each method at its best rate. In a step a "
        "node sends 1 model (one-peer and base), 2 (ring), 4 (torus) or log2 n (exponential). The "
        "figure shows no seconds, no long training and no uneven data.",
        partial(draw, losses),
    )
    return Findings(
        read_claims("scaling", figures, SECTION.find_numbers(scale)),
        [tabulate(records)],
        [drawn] if losses else [],
    )


GRAPHS = ("ring", "torus", "exponential", "one-peer", "base")


def count_messages(run: Record) -> str:
    """Returns the models that a node sends in a step, on average."""
    peers = {"ring": 2, "torus": 4, "exponential": run["nodes"].bit_length() - 1}
    each = {"allreduce": 2, "outer": 2 / 16, "local-sgd": 2 / 16}
    rarely = 16 if run["method"] == "sgp-every-H" else 1
    return f"{each.get(run['method'], peers.get(run['graph'], 1) / rarely):.3g}"


def tabulate(records: Mapping[str, Record]) -> Table:
    """Returns what was measured over the most nodes."""
    most = max((run["nodes"] for run in records.values()), default=0)
    rows = []
    for run in records.values():
        if run["nodes"] == most and None not in run["loss"]:
            gap = "-" if run["gap"] is None else f"{run['gap']:.2g}"
            texts = (run["batch"], run["method"], run["graph"].replace("none", "-"))
            fields = (("loss", 1, ".4f"), ("accuracy", 100, ".1f"), ("worst_accuracy", 100, ".1f"))
            found = [
                f"{Sample(tuple(scale * x for x in run[name])):{spec}}"
                for name, scale, spec in (*fields, ("distance", 1, ".3f"))
            ]
            rows.append((*texts, count_messages(run), gap, f"{run['rate']:g}", *found))
    return read_table("scaling", rows or [["-"] * 10])


def draw(losses: Mapping[str, Sample], figure: MatplotlibFigure) -> None:
    """Draws the loss over the number of nodes, for both ways to choose batches."""
    figure.set_size_inches(8.6, 4.4)
    colors = choose_colors(list(DRAWN.values()))
    panels = figure.subplots(1, len(BATCHES), sharey=True)
    for axes, (batch, title) in zip(panels, BATCHES.items(), strict=True):
        for (method, graph), name in DRAWN.items():
            found = {n: losses.get(f"{batch}/{method}/{graph}/{n}") for n in NODES}
            points = [(n, x.mean, x.spread) for n, x in found.items() if x is not None]
            if points:
                look = {"lw": 2.5 if method == "allreduce" else 1.5, "capsize": 2, "marker": "o"}
                style = "--" if method in DASHED else "-"
                xs, ys, spreads = zip(*points, strict=True)
                axes.errorbar(
                    xs, ys, spreads, ls=style, ms=3, color=colors[name], label=name, **look
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(NODES, [f"{n:,}" for n in NODES])
        axes.set(title=title, xlabel="nodes")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss of the average model, nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


SECTION = read_section(name="scaling", list_runs=list_runs, find=find)
