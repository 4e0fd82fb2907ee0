"""Goodput and loss while nodes die: asynchronous gossip, all-reduce with restarts, and a quorum."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.fault_injection.churn import MAX_DIFFERENCE, SIMULATED
from experiments.report.drawing import COLORS, MARKERS, label_axes
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Scale,
    exact,
    read_section,
    tabulate,
)
from experiments.report.sections.times import can_limit_links, find_gap
from experiments.results import Record
from experiments.runner import Run

RUN = "churn"
TITLES = {
    "async-sgp": "asynchronous SGP",
    "async-outer": "asynchronous outer optimizer",
    "allreduce": "AllReduce, restarts (simulated)",
    "quorum": "quorum of 4 of 8, syncer (simulated)",
}
ASYNCHRONOUS = ("async-sgp", "async-outer")
RATES = (0, 2, 4, 6)
NOT_JUDGED = "a run of two minutes has one seed, whose losses are shown and not judged"
COLUMNS = {  # of the table -> field, format
    "method": ("title", ""),
    "deaths a minute": ("deaths_per_minute", "g"),
    "steps of a node": ("steps", ".0f"),
    "goodput": ("goodput", ".0%"),
    "of that without deaths": ("kept", ".0%"),
    "loss at the end, nats": ("loss", ".2f"),
    "sent by a node, B/s": ("bytes_per_second", ",.0f"),
    "the account differs by": ("difference", ".0e"),
}


def list_runs(scale: Scale) -> list[Run]:
    """One call; when quick, or without root, what is simulated only."""
    algorithms = TITLES if can_limit_links() and not scale.is_quick else ("allreduce", "quorum")
    rates = (0, 6) if scale.is_quick else RATES
    sizes = f"""churn --deaths-per-minute {" ".join(map(str, rates))} --slow 1 --bandwidth 20mbit
    --minutes {0.5 if scale.is_quick else 2} --step-seconds 0.5 --restart-seconds 15"""
    arguments = (*sizes.split(), "--algorithm", *algorithms)
    return [Run(RUN, "fault_injection", arguments, is_alone=True)]


def find(scale: Scale, results: Results) -> Findings:
    """Compares what every method keeps of its goodput as more nodes die."""
    del scale
    records = [run for result in results.values() for run in result.runs]
    most = max((run["deaths_per_minute"] for run in records), default=0)
    without = {x["algorithm"]: x["goodput"] for x in records if x["deaths_per_minute"] == 0}
    rows: list[Record] = [
        {
            **run,
            "title": TITLES[run["algorithm"]],
            "kept": run["goodput"] / without[run["algorithm"]],
            "difference": abs(run["account"]["difference"]),
        }
        for run in records
    ]
    kept = {row["algorithm"]: row["kept"] for row in rows if row["deaths_per_minute"] == most}
    differences = {
        f"{row['title']}, {row['deaths_per_minute']:g}": exact(
            row["difference"] / row["account"]["founded"]
        )
        for row in rows
    }
    claims = [
        Claim(
            "Every account closes: of the push-sum weight of asynchronous nodes, of the steps of "
            f"what is simulated. Relative differences are at most {MAX_DIFFERENCE:g}.",
            "0",
            differences,
            at_most=MAX_DIFFERENCE,
            spec=".0e",
        ),
        Claim(
            f"With {most:g} deaths a minute asynchronous nodes keep at least 40 % of the goodput "
            "that they have without deaths.",
            "learners that are decoupled keep 80 % of it with 8 learners, where data parallelism "
            "keeps 18 % (Decoupled DiLoCo, 2.4 million chips, simulated there)",
            {TITLES[name]: exact(kept[name]) for name in ASYNCHRONOUS if name in kept},
            at_least=0.4,
            spec=".0%",
        ),
        Claim(
            f"With {most:g} deaths a minute all-reduce that restarts from checkpoints keeps at "
            "most 20 % of it.",
            "18 % (the same)",
            {TITLES[name]: exact(kept[name]) for name in ("allreduce",) if name in kept},
            at_most=0.2,
            spec=".0%",
            is_modelled=True,
        ),
        Claim(
            f"A quorum with a syncer keeps more than all-reduce with {most:g} deaths a minute.",
            "80 % against 18 % (the same)",
            {"difference": exact(kept["quorum"] - kept["allreduce"])}
            if {"quorum", "allreduce"} <= kept.keys()
            else {},
            at_least=0.0,
            spec="+.0%",
            is_modelled=True,
        ),
    ]
    table = tabulate(
        "Goodput and loss while nodes die",
        COLUMNS,
        rows,
        find_gap(results),
        "Goodput: the share of the steps that all nodes would make without deaths and messages, "
        f"and that are not lost. {NOT_JUDGED.capitalize()}.",
    )
    lines = {
        title: [row for row in rows if row["algorithm"] == name] for name, title in TITLES.items()
    }
    figure = Figure(
        "goodput",
        "Goodput and loss over deaths a minute of 8 nodes; dashed lines are simulated.",
        partial(draw, {title: line for title, line in lines.items() if line}),
    )
    return Findings(claims, [table], [figure] if rows else [])


def draw(lines: Mapping[str, Sequence[Record]], figure: MatplotlibFigure) -> None:
    """Draws both panels."""
    figure.set_size_inches(10.0, 4.4)
    panels = figure.subplots(1, 2)
    for number, (title, rows) in enumerate(lines.items()):
        look = {"color": COLORS[number], "marker": MARKERS[number]}
        look["ls"] = "--" if rows[0]["algorithm"] in SIMULATED else "-"
        rates = [row["deaths_per_minute"] for row in rows]
        panels[0].plot(rates, [100 * row["goodput"] for row in rows], label=title, **look)
        panels[1].plot(rates, [row["loss"] for row in rows], **look)
    label_axes(panels[0], "Steps that are not lost", "deaths a minute", "goodput, %")
    label_axes(panels[1], "Loss at the end", "deaths a minute", "training loss, nats per token")
    panels[0].set_ylim(bottom=0)
    figure.legend(fontsize=8, ncols=2, loc="outside lower center")


SECTION = read_section(name="churn", list_runs=list_runs, find=find)
