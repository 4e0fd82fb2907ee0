"""Examples per second beside slow nodes, measured and simulated."""

from typing import NamedTuple

from experiments.report.estimates import GAPS, exact
from experiments.report.section import Claim, Findings, Results, Scale, Section, Table
from experiments.report.sections.timing import TimedRow, judge_errors, list_rows, make_bars
from experiments.results import Record
from experiments.runner import Run

FOUR = "stragglers-4"
BOUND = 0.15
QUICK_BOUND = 0.5  # processes that start beside others on few cores
LOCKSTEP = "allreduce"
ASYNCHRONOUS = "async-sgp"
SLOW = "4x"
RANDOM = "random"
GOSSIP = {"sgp": "SGP", "1-osgp": "1-OSGP"}  # in lockstep with the peers only
MARGIN = 0.05  # of the examples per second that remain
PEER_MARGIN = 0.02
SLOWNESS = ("none", "2x", SLOW, RANDOM, "lognormal")
ALGORITHMS = (LOCKSTEP, *GOSSIP, ASYNCHRONOUS, "async-adpsgd")
LOSSES = {
    LOCKSTEP: "all nodes wait for it: AllReduce keeps 1/4 of its examples per second",
    ASYNCHRONOUS: "nobody waits: asynchronous SGP keeps (N - 1 + 1/4) / N of them",
}
COLUMNS = (
    "nodes",
    "slowness",
    "algorithm",
    "measured (examples/s)",
    "simulated (examples/s)",
    "simulated / measured",
    "of those without slow nodes",
    "if only computation took time",
)


class Measurement(NamedTuple):
    """A call of the measurement of slow nodes: `seconds` of computation in each of `steps`."""

    run: str
    nodes: int
    slowness: tuple[str, ...]
    algorithms: tuple[str, ...]
    steps: int
    seconds: float


FULL = (
    Measurement(FOUR, 4, SLOWNESS, ALGORITHMS, 20, 0.15),
    Measurement("stragglers-8", 8, ("none", SLOW, RANDOM), (LOCKSTEP, ASYNCHRONOUS), 15, 0.4),
)
QUICK = (Measurement("stragglers-2", 2, ("none", SLOW), (LOCKSTEP, ASYNCHRONOUS), 10, 0.1),)


def list_measurements(scale: Scale) -> tuple[Measurement, ...]:
    """Returns four nodes with all kinds of slowness, and eight with three; when quick, two."""
    return QUICK if scale.is_quick else FULL


def list_runs(scale: Scale) -> list[Run]:
    """The calls of `experiments.speed stragglers`."""
    runs = []
    for name, nodes, slowness, algorithms, steps, seconds in list_measurements(scale):
        sizes = ("--nodes", f"{nodes}", "--steps", f"{steps}", "--compute-seconds", f"{seconds}")
        arguments = ("stragglers", *sizes, "--slowness", *slowness, "--algorithm", *algorithms)
        runs.append(Run(name, "speed", arguments, is_alone=True))
    return runs


def find(scale: Scale, results: Results) -> Findings:
    """Compares measured examples per second with those of the simulation."""
    bound = QUICK_BOUND if scale.is_quick else BOUND
    aim = f"within {bound:.0%}: the aim of this project"
    claims = []
    rows = []
    for result in results.values():
        if not result.runs:
            continue
        timed = list_timed(result.runs)
        rows += timed
        nodes = result.runs[0]["nodes"]
        simulation = judge_errors(
            f"With {nodes} nodes the simulation is within {bound:.0%} of every measured rate of "
            "examples.",
            aim,
            timed,
            bound,
            if_not="The simulation leaves out the processor time of a step.",
        )
        margin = 3 * MARGIN if scale.is_quick else MARGIN
        claims += [simulation, *judge_losses(result.runs, nodes, margin)]
        claims += judge_peers(result.runs, nodes)
    if not claims:
        claims = [judge_errors("The simulation is near what is measured.", aim, [], bound)]
    caption = "Examples per second of all nodes, measured and simulated, by nodes and slowness."
    unit = "examples per second, all nodes"
    figures = make_bars("examples", caption, rows, unit, bound, "simulated")
    return Findings(claims, [tabulate(results)], figures)


def list_timed(runs: list[Record]) -> list[TimedRow]:
    """Returns the rows of a measurement, grouped by nodes and slowness."""
    model = "modelled_examples_per_second"
    modelled = sorted((run for run in runs if run[model] is not None), key=get_slowness)
    rows = list_rows(modelled, "slowness", "examples_per_second", model)
    return [
        row._replace(setting=f"{run['nodes']} nodes, slowness: {row.setting}")
        for row, run in zip(rows, modelled, strict=True)
    ]


def judge_losses(runs: list[Record], nodes: int, margin: float) -> list[Claim]:
    """Returns the claims on one node that is four times slower, in lockstep and without it."""
    found = {run["algorithm"]: run for run in runs if run["slowness"] == SLOW}
    claims = []
    for name, text in LOSSES.items():
        statement = f"If one of {nodes} nodes is 4 times slower, {text}, ± {100 * margin:g} points."
        run = found.get(name)
        if run is None or run["ratio_to_none"] is None:
            claims.append(Claim(statement, "-", {}))
            continue
        ideal = run["ideal_ratio_to_none"]
        rows = {"": exact(run["ratio_to_none"])}
        published = f"{ideal:.1%}, by arithmetic"
        claims.append(Claim(statement, published, rows, ideal - margin, ideal + margin, ".1%"))
    return claims


def judge_peers(runs: list[Record], nodes: int) -> list[Claim]:
    """Returns the claims that gossip, which waits for a peer, keeps more than AllReduce.

    Where one node is always the slow one, all wait for it in the end, through their peers.
    """
    kept = {run["algorithm"]: run["ratio_to_none"] for run in runs if run["slowness"] == RANDOM}
    if kept.get(LOCKSTEP) is None:
        return []
    return [
        Claim(
            f"If every step of {nodes} nodes takes 1, 2 or 4 times as long at random, {title} "
            f"keeps {100 * PEER_MARGIN:g} points more of its examples per second than AllReduce.",
            "less sensitive to stragglers (SGP-19, section 1), no figure",
            {f"{kept[name]:.1%} against {kept[LOCKSTEP]:.1%}:": exact(kept[name] - kept[LOCKSTEP])},
            at_least=PEER_MARGIN,
            spec="+.1%",
            if_not="A delay reaches every node within log2(N) steps of one-peer gossip in "
            "lockstep, and over few nodes that is soon.",
        )
        for name, title in GOSSIP.items()
        if kept.get(name) is not None
    ]


def tabulate(results: Results) -> Table:
    """Returns a row per nodes, slowness and algorithm; runs that failed have one that says so."""
    rows = []
    for name, result in results.items():
        runs = sorted(result.runs, key=get_slowness)
        rows += [list_cells(run) for run in runs]
        if not runs:
            gaps = [GAPS[result.status]] * (len(COLUMNS) - 1)
            rows.append((name.partition("-")[2], *gaps))
    return Table(
        "Examples per second of all nodes",
        COLUMNS,
        rows,
        "Measured: real processes; their computation is a sleep, as of devices that do not share "
        "these cores. Simulated: event by event, with the same factors of every step of every "
        "node. The last column is arithmetic, for nodes that all wait for each other, or for none.",
    )


def get_slowness(run: Record) -> int:
    """The position of a run's slowness in the order of the tables."""
    return SLOWNESS.index(run["slowness"])


def list_cells(run: Record) -> tuple[str, ...]:
    """Returns a row of the table."""
    modelled = run["modelled_examples_per_second"]
    kept = run["ratio_to_none"]
    return (
        f"{run['nodes']}",
        run["slowness"],
        run["algorithm"],
        f"{run['examples_per_second']:,.0f}",
        "-" if modelled is None else f"{modelled:,.0f}",
        "-" if modelled is None else f"{run['modelled_ratio']:.3f}",
        "-" if kept is None else f"{kept:.1%}",
        "-" if run["algorithm"] in GOSSIP else f"{run['ideal_ratio_to_none']:.1%}",
    )


def find_numbers(scale: Scale) -> dict[str, object]:
    """Returns the sizes of the text."""
    measurements = list_measurements(scale)
    return {
        "nodes": " and ".join(f"{measurement.nodes}" for measurement in measurements),
        "seconds": " or ".join(f"{measurement.seconds:g}" for measurement in measurements),
        "slowness": ", ".join(measurements[0].slowness[1:]),
    }


SECTION = Section(
    name="stragglers",
    title="Slow nodes: who waits for whom, measured and simulated",
    source="SGP-18, section 5.1 (asynchronous SGP is left to the future there)",
    text="""
    The papers argue that gossip waits for fewer nodes than AllReduce, and that asynchronous methods
    wait for none, without figures for slow nodes. Here {nodes} real processes train softmax
    regression, in lockstep or asynchronously; their computation is a sleep of {seconds} s times a
    factor ({slowness}: a number is the factor of one node, others are drawn for every step of every
    node). A simulation of events with the same factors is set beside them.
    """,
    find_numbers=find_numbers,
    list_runs=list_runs,
    find=find,
)
