"""Hours to a loss against bandwidth and nodes: steps are measured, seconds of a step modelled."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure

import gossipjax as gx
from experiments.plots import choose_colors
from experiments.presets.sgp19 import TABLE_1
from experiments.report.section import (
    Estimate,
    Figure,
    Findings,
    Results,
    Sample,
    Scale,
    Table,
    compare,
    exact,
    read_claims,
    read_records,
    read_section,
    read_table,
)
from experiments.runner import Run
from experiments.steps_to_loss import BUCKETS, EXAMPLES, LATENCY, WORKLOAD, predict_seconds
from gossipjax.cost_model import Network, from_transform, predict_step
from gossipjax.cost_model.networks import SGP_ETHERNET

RUN = "steps-to-loss"
NODES = (4, 16, 64, 256, 1024)
EVERY = 16
SHOWN = 16  # nodes, in the figure
ALL_REDUCE = "allreduce"
TITLES = {
    ALL_REDUCE: "AllReduce, the best of four",
    "sgp": "SGP",
    "1-osgp": "1-OSGP",
    "dpsgd": "D-PSGD, pairs",
    "sgp-every-H": f"SGP every {EVERY} steps",
    "diloco": f"DiLoCo, H = {EVERY}",
}
BANDWIDTHS = np.logspace(7, 11, 81)  # bit/s
FASTEST = 1e11
MODEL_ERROR = 0.15  # of modelled seconds, as the tests of the cost model demand
STEP_SPREAD = 0.1  # standard deviation of the logarithm of a seed's steps
OVER = ("1-osgp",)  # dashed, as it lies over the line of another


def list_runs(scale: Scale) -> list[Run]:
    """The steps of all methods; when quick, over 4 nodes."""
    if scale.is_quick:
        small = ("--nodes", "4", "--seed", "0", "--loss", "0.6", "--max-steps", "512")
        return [Run(RUN, "steps_to_loss", small)]
    images = ("--fashion-mnist", f"{scale.fashion_mnist}") if scale.fashion_mnist else ()
    return [Run(RUN, "steps_to_loss", (*images, "--nodes", *map(str, NODES)))]


def read_steps(results: Results) -> dict[int, dict[str, Sample]]:
    """Returns the logarithms of the steps of each seed, by nodes and method; of none that failed.

    A method that did not reach the loss is left out.
    """
    steps: dict[int, dict[str, Sample]] = {}
    for record in read_records(results, RUN):
        if None not in record["steps"]:
            logs = tuple(math.log(count) for count in record["steps"])
            sample = Sample(logs, single_spread=STEP_SPREAD)
            steps.setdefault(record["nodes"], {})[record["method"]] = sample
    return {n: row for n, row in steps.items() if ALL_REDUCE in row and len(row) > 1}


def compare_steps(row: Mapping[str, Sample], name: str) -> Estimate:
    """Returns the logarithm of the steps of a method over those of AllReduce."""
    samples = row[name], row[ALL_REDUCE]
    return compare(samples[0].values, samples[1].values, STEP_SPREAD)


def find_hours(steps: Mapping[int, Mapping[str, Sample]]) -> dict[int, dict[str, np.ndarray]]:
    """Returns the hours until a method has the loss that AllReduce has after 90 epochs."""
    hours: dict[int, dict[str, np.ndarray]] = {}
    for nodes, row in steps.items():
        least = EXAMPLES / (WORKLOAD.examples * nodes)  # steps of AllReduce
        for name, sample in row.items():
            count = least * math.exp(sample.mean - row[ALL_REDUCE].mean)
            seconds = predict_seconds(name, nodes, EVERY, BANDWIDTHS)
            hours.setdefault(nodes, {})[name] = count * seconds / 3600
    return hours


def find_lead(row: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[str]]:
    """Returns AllReduce's hours over the best gossip's at each bandwidth, and which that is."""
    rivals = [name for name in row if name != ALL_REDUCE]
    table = np.array([row[name] for name in rivals])
    return row[ALL_REDUCE] / table.min(0), [rivals[index] for index in table.argmin(0)]


def find_last(lead: np.ndarray, level: float) -> float:
    """Returns the largest bandwidth in Gbit/s where the logarithm of the lead is above a level.

    Beyond the bandwidths of the figure it is the first or the last of them.
    """
    excess = np.log(lead) - level
    above = np.flatnonzero(excess > 0)
    if not len(above) or above[-1] == len(lead) - 1:
        return float(BANDWIDTHS[above[-1] if len(above) else 0]) / 1e9
    index = above[-1]
    part = excess[index] / (excess[index] - excess[index + 1])
    ends = np.log(BANDWIDTHS[index : index + 2])
    return math.exp(ends[0] + part * (ends[1] - ends[0])) / 1e9


def find(scale: Scale, results: Results) -> Findings:
    """Compares the hours of gossip with those of the best all-reduce."""
    del scale
    steps = read_steps(results)
    hours = find_hours(steps)
    leads = {n: find_lead(row) for n, row in hours.items()}
    crossings = {}
    for n, (lead, names) in leads.items():
        at = max(int(np.argmax(lead <= 1)) - 1, 0) if (lead <= 1).any() else -1
        of_steps = compare_steps(steps[n], names[at])
        # The error of the logarithm of a lead is that of the steps, and that of the model; the
        # limits of a crossing are where the lead is as large.
        error = math.hypot((of_steps.high - of_steps.low) / 2, MODEL_ERROR)
        crossings[n] = Estimate(*(find_last(lead, level) for level in (0.0, error, -error)))
    figures = {
        "steps": {f"{n} nodes": compare_steps(x, "sgp") for n, x in steps.items() if "sgp" in x},
        "crossings": {f"{n} nodes": crossing for n, crossing in crossings.items()},
    }
    for name, bits in (("10 Mbit/s", 1e7), ("1 Gbit/s", 1e9)):
        at = int(np.argmin(abs(BANDWIDTHS - bits)))
        figures[name] = {f"{n} nodes": exact(float(lead[at])) for n, (lead, _) in leads.items()}
    tables = [tabulate_steps(steps)]
    if leads:
        tables.append(tabulate_leads(leads, crossings))
    shown = SHOWN if SHOWN in hours else min(hours, default=0)
    title = f"{shown} nodes: hours until ResNet-50 learned what\nAllReduce learns in 90 epochs"
    figure = Figure(
        "hours",
        "256 images of ImageNet a node and step. Steps: measured on a small task over as many "
        "simulated nodes. Seconds: modelled. Crosses: published hours at equal epochs (SGP-19, "
        "Table 1).",
        partial(draw_hours, hours.get(shown, {}), shown, title),
    )
    return Findings(read_claims("hours", figures), tables, [figure] if hours else [])


def tabulate_steps(steps: Mapping[int, Mapping[str, Sample]]) -> Table:
    """Returns the measured steps, over those of AllReduce."""
    rows = []
    for name, title in TITLES.items():
        cells = []
        for row in steps.values():
            if name not in row:
                cells.append("not reached")
            elif name == ALL_REDUCE:
                counts = row[name]._replace(values=tuple(map(math.exp, row[name].values)))
                cells.append(f"{counts:.0f} steps")
            else:
                ratio = Estimate(*map(math.exp, compare_steps(row, name)))
                cells.append(f"x {ratio:.2f}")
        rows.append((title, *cells))
    return Table(
        "Steps to the loss: measured, each method at its rate",
        ("method", *(f"{n} nodes" for n in steps)),
        rows,
        "With 90 % limits. A few hundred steps are few: the term that the disagreement of nodes "
        "adds falls faster than the others as steps grow (SGP-19, theorem 1), so that these "
        "factors are high for long training. SGP-19's models lose 0 to 1.2 points at equal epochs.",
    )


def tabulate_leads(
    leads: Mapping[int, tuple[np.ndarray, list[str]]], crossings: Mapping[int, Estimate]
) -> Table:
    """Returns who is first at which bandwidth, and where AllReduce gets ahead."""
    shown = [int(np.argmin(abs(BANDWIDTHS - 10.0**e))) for e in range(7, 12)]
    rows = []
    for n, (lead, names) in leads.items():
        cells = [f"{lead[i]:.2f} ({TITLES[names[i]]})" for i in shown]
        end = FASTEST / 1e9
        text = f"{crossings[n]:.1f}" if crossings[n].value < end else f"above {end:.0f}"
        rows.append((f"{n}", *cells, text))
    return read_table("hours", rows)


def draw_hours(
    row: Mapping[str, np.ndarray], nodes: int, title: str, figure: MatplotlibFigure
) -> None:
    """Draws the hours of each method over `nodes`, and those that SGP's authors published."""
    figure.set_size_inches(5.2, 4.6)  # a telephone shows it at half the size, and it can be read
    axes = figure.add_subplot()
    colors = choose_colors(list(TITLES.values()))
    for name, values in row.items():
        look = {"lw": 2.5 if name == ALL_REDUCE else 1.5, "ls": "--" if name in OVER else "-"}
        axes.plot(BANDWIDTHS, values, color=colors[TITLES[name]], label=TITLES[name], **look)
    # Their all-reduce is a tree through the memory of the hosts: the cross is on its curve.
    color = colors[TITLES[ALL_REDUCE]]
    steps = EXAMPLES / (WORKLOAD.examples * nodes)
    seconds = [predict_published(float(bits), nodes) for bits in BANDWIDTHS]
    label = "AllReduce as SGP's authors ran it"
    axes.plot(BANDWIDTHS, steps * np.array(seconds) / 3600, ":", color=color, label=label)
    for published, name, who in (("ar", ALL_REDUCE, "AllReduce"), ("sgp", "sgp", "SGP")):
        if nodes in TABLE_1[published]:
            hours = float(TABLE_1[published][nodes][1])
            look = {"color": colors[TITLES[name]], "ms": 9, "mew": 2.5, "zorder": 5}
            axes.plot([1e10], [hours], "x", label=f"published: {who}, {hours:g} h", **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([10.0**e for e in range(7, 12)], ["10 M", "100 M", "1 G", "10 G", "100 G"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=title, xlabel="bandwidth of a node, bit/s", ylabel="hours to the loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)


def predict_published(bits: float, nodes: int) -> float:
    """Returns the modelled seconds of a step with an all-reduce like that of SGP's authors."""
    network = Network(bandwidth=bits / 8, host_copy=SGP_ETHERNET.host_copy, latency=LATENCY)
    tree = from_transform(gx.allreduce(), ALL_REDUCE, "tree")
    return predict_step(tree, WORKLOAD, network, nodes).seconds


SECTION = read_section(
    name="hours",
    find_numbers=lambda scale: dataclasses.asdict(WORKLOAD) | {"every": EVERY, "buckets": BUCKETS},
    list_runs=list_runs,
    find=find,
)
