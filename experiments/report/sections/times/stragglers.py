"""Examples per second beside slow nodes, measured and simulated."""

from typing import NamedTuple

from experiments.report.section import GAPS, Claim, Findings, Results, Run, Scale, Section, Table
from experiments.report.sections.times.rows import (
    TimedRow,
    claim_errors,
    list_rows,
    make_bars,
)
from experiments.results import Record

FOUR = "stragglers-4"
EIGHT = "stragglers-8"
QUICK = "stragglers-2"
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
    """A call of the measurement of slow nodes.

    Attributes:
      run: its name.
      nodes: processes.
      slowness: kinds of it.
      algorithms: that are measured.
      steps: of every node.
      seconds: of the computation of a step.
    """

    run: str
    nodes: int
    slowness: tuple[str, ...]
    algorithms: tuple[str, ...]
    steps: int
    seconds: float


FULL = (
    Measurement(FOUR, 4, SLOWNESS, ALGORITHMS, 20, 0.15),
    Measurement(EIGHT, 8, ("none", SLOW, RANDOM), (LOCKSTEP, ASYNCHRONOUS), 15, 0.4),
)
SMALL = (Measurement(QUICK, 2, ("none", SLOW), (LOCKSTEP, ASYNCHRONOUS), 10, 0.1),)


def list_measurements(scale: Scale) -> tuple[Measurement, ...]:
    """Four nodes with all kinds of slowness, and eight with three; when quick, two nodes."""
    return SMALL if scale.is_quick else FULL


def list_runs(scale: Scale) -> list[Run]:
    """The calls of `experiments.speed stragglers`."""
    runs = []
    for name, nodes, slowness, algorithms, steps, seconds in list_measurements(scale):
        sizes = ("--nodes", f"{nodes}", "--steps", f"{steps}", "--compute-seconds", f"{seconds}")
        arguments = ("stragglers", *sizes, "--slowness", *slowness, "--algorithm", *algorithms)
        runs.append(Run(name, "speed", arguments, is_alone=True))
    return runs


def find(scale: Scale, results: Results) -> Findings:
    """Measured examples per second beside those of the simulation."""
    bound = QUICK_BOUND if scale.is_quick else BOUND
    claims = []
    rows = []
    for result in results.values():
        timed = list_timed(result.runs)
        rows += timed
        if not result.runs:
            continue
        nodes = result.runs[0]["nodes"]
        statement = (
            f"With {nodes} nodes the simulation is within {bound:.0%} of every measured rate of "
            "examples."
        )
        aim = f"within {bound:.0%}: the aim of this project"
        claims.append(claim_errors(statement, aim, timed, bound))
        margin = 3 * MARGIN if scale.is_quick else MARGIN
        claims += claim_losses(result.runs, nodes, margin)
        claims += claim_peers(result.runs, nodes)
    if not claims:
        aim = f"{bound:.0%}"
        claims = [claim_errors("The simulation is near what is measured.", aim, [], bound)]
    caption = "Examples per second of all nodes, measured and simulated, by nodes and slowness."
    figure = make_bars(
        "examples", caption, rows, "examples per second, all nodes", bound, "simulated"
    )
    return Findings(
        claims=claims,
        sentence=describe(claims, results),
        tables=[make_table(results)],
        figures=[] if figure is None else [figure],
    )


def list_timed(runs: list[Record]) -> list[TimedRow]:
    """The rows of a measurement, grouped by nodes and slowness, in the order of the tables."""
    model = "modelled_examples_per_second"
    modelled = sorted((run for run in runs if run[model] is not None), key=get_slowness)
    rows = list_rows(modelled, "slowness", "examples_per_second", model)
    return [
        row._replace(setting=f"{run['nodes']} nodes, slowness: {row.setting}")
        for row, run in zip(rows, modelled, strict=True)
    ]


def claim_losses(runs: list[Record], nodes: int, margin: float) -> list[Claim]:
    """What one node that is four times slower costs in lockstep, and where nobody waits."""
    ratios = {run["algorithm"]: run for run in runs if run["slowness"] == SLOW}
    claims = []
    for name, text in (
        (LOCKSTEP, "all nodes wait for it: AllReduce keeps 1/4 of its examples per second"),
        (ASYNCHRONOUS, "nobody waits: asynchronous SGP keeps (N - 1 + 1/4) / N of them"),
    ):
        statement = f"If one of {nodes} nodes is 4 times slower, {text}, ± {100 * margin:g} points."
        run = ratios.get(name)
        if run is None or run["ratio_to_none"] is None:
            claims.append(Claim(statement, "-", "-", None))
            continue
        kept = run["ratio_to_none"]
        ideal = run["ideal_ratio_to_none"]
        holds = abs(kept - ideal) <= margin
        claims.append(Claim(statement, f"{ideal:.1%}, by arithmetic", f"{kept:.1%}", holds))
    return claims


def claim_peers(runs: list[Record], nodes: int) -> list[Claim]:
    """That gossip, which waits for a peer, keeps more than AllReduce, which waits for all.

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
            f"{kept[name]:.1%} against {kept[LOCKSTEP]:.1%}",
            kept[name] - kept[LOCKSTEP] > PEER_MARGIN,
        )
        for name, title in GOSSIP.items()
        if kept.get(name) is not None
    ]


def make_table(results: Results) -> Table:
    """A row per nodes, slowness and algorithm; runs that failed have one that says so."""
    rows = []
    for name, result in results.items():
        runs = sorted(result.runs, key=get_slowness)
        rows += [make_cells(run) for run in runs]
        if not runs:
            gaps = [GAPS[result.status]] * (len(COLUMNS) - 1)
            rows.append((name.partition("-")[2], *gaps))
    return Table(
        "Examples per second of all nodes",
        COLUMNS,
        tuple(rows),
        "Measured: real processes; their computation is a sleep, as of devices that do not share "
        "these cores. Simulated: event by event, with the same factors of every step of every "
        "node. The last column is arithmetic, for nodes that all wait for each other, or for "
        "nobody.",
    )


def get_slowness(run: Record) -> int:
    """The place of a run's slowness in the order of the tables."""
    return SLOWNESS.index(run["slowness"])


def make_cells(run: Record) -> tuple[str, ...]:
    """A row of the table."""
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


def describe(claims: list[Claim], results: Results) -> str:
    """What was found, in a few sentences."""
    parts = []
    if any(not result.runs for result in results.values()):
        parts.append("A measurement is missing.")
    errors = [claim for claim in claims if claim.is_modelled and claim.holds is not None]
    if errors:
        ranges = ", and by ".join(claim.ours for claim in errors)
        parts.append(f"Simulated over measured rates are off by {ranges}.")
    if any(not claim.holds for claim in errors):
        parts.append("The simulation leaves out the processor time of a step.")
    losses = [claim for claim in claims if not claim.is_modelled and claim.holds is not None]
    if losses and all(claim.holds for claim in losses):
        parts.append(
            "As in the argument: one slow node costs all that wait for it as much as itself, and "
            "the others nothing where nobody waits."
        )
    failed = [claim.statement for claim in losses if not claim.holds]
    if failed:
        parts.append(f"This does not hold: {' '.join(failed)}")
    if any("SGP keeps" in statement for statement in failed):
        parts.append(
            "A delay reaches every node within log2(N) steps of one-peer gossip in lockstep, and "
            "over few nodes that is soon."
        )
    return " ".join(parts)


def write_text(scale: Scale) -> str:
    """What is measured."""
    measurements = list_measurements(scale)
    nodes = " and ".join(f"{measurement.nodes}" for measurement in measurements)
    seconds = " or ".join(f"{measurement.seconds:g}" for measurement in measurements)
    drawn = "" if scale.is_quick else ", or drawn for every step of every node"
    factors = "4" if scale.is_quick else "2 or 4"
    return (
        "The papers argue that gossip waits for fewer nodes than AllReduce, and that asynchronous "
        f"methods wait for none, without figures for slow nodes. Here {nodes} real processes train "
        "softmax regression, in lockstep or by nodes that wait for nobody; their computation is a "
        f"sleep of {seconds} s times a factor: {factors} at one node{drawn}. A simulation of "
        "events with the same factors is set beside them."
    )


SECTION = Section(
    name="stragglers",
    title="Slow nodes: who waits for whom, measured and simulated",
    source="SGP-18, section 5.1 (asynchronous SGP is left to the future there)",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
