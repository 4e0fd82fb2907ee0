"""Examples per second beside slow nodes, measured and simulated."""

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
MARGIN = 0.05  # of the examples per second that remain
SLOWNESS = ("none", "2x", SLOW, "random", "lognormal")
ALGORITHMS = (LOCKSTEP, "sgp", "1-osgp", ASYNCHRONOUS, "async-adpsgd")
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


def list_runs(scale: Scale) -> list[Run]:
    """Four nodes with all kinds of slowness, and eight with three; when quick, two nodes."""
    if scale.is_quick:
        return [make_run(QUICK, 2, ("none", SLOW), (LOCKSTEP, ASYNCHRONOUS), 10, 0.1)]
    return [
        make_run(FOUR, 4, SLOWNESS, ALGORITHMS, 20, 0.15),
        make_run(EIGHT, 8, ("none", SLOW, "random"), (LOCKSTEP, ASYNCHRONOUS), 15, 0.4),
    ]


def make_run(
    name: str,
    nodes: int,
    slowness: tuple[str, ...],
    algorithms: tuple[str, ...],
    steps: int,
    seconds: float,
) -> Run:
    """A call of the measurement of slow nodes."""
    sizes = ("--nodes", f"{nodes}", "--steps", f"{steps}", "--compute-seconds", f"{seconds}")
    arguments = ("stragglers", *sizes, "--slowness", *slowness, "--algorithm", *algorithms)
    return Run(name, "speed", arguments, is_alone=True)


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
        claims.append(claim_errors(statement, "within 15 %: the aim of this project", timed, bound))
        margin = 3 * MARGIN if scale.is_quick else MARGIN
        claims += claim_losses(result.runs, nodes, margin)
    if not claims:
        claims = [claim_errors("The simulation is near what is measured.", "15 %", [], bound)]
    caption = "Examples per second of all nodes, measured and simulated, by nodes and slowness."
    figure = make_bars("examples", caption, rows, "examples per second, all nodes", bound)
    return Findings(
        claims=claims,
        sentence=describe(claims, results),
        tables=[make_table(results)],
        figures=[] if figure is None else [figure],
    )


def list_timed(runs: list[Record]) -> list[TimedRow]:
    """The rows of a measurement, grouped by nodes and slowness."""
    model = "modelled_examples_per_second"
    rows = list_rows(runs, "slowness", "examples_per_second", model)
    modelled = [run for run in runs if run[model] is not None]
    return sorted(
        (
            row._replace(setting=f"{run['nodes']} nodes, slowness: {row.setting}")
            for row, run in zip(rows, modelled, strict=True)
        ),
        key=get_setting,
    )


def get_setting(row: TimedRow) -> str:
    """The setting of a row, by which rows are sorted."""
    return row.setting


def claim_losses(runs: list[Record], nodes: int, margin: float) -> list[Claim]:
    """What one node that is four times slower costs in lockstep, and where nobody waits."""
    ratios = {run["algorithm"]: run for run in runs if run["slowness"] == SLOW}
    claims = []
    for name, text in (
        (LOCKSTEP, "all nodes wait for it: AllReduce keeps 1/4 of its examples per second"),
        (ASYNCHRONOUS, "nobody waits: asynchronous SGP keeps (N - 1 + 1/4) / N of them"),
    ):
        statement = f"If one of {nodes} nodes is 4 times slower, {text}, ± {margin:.0%} points."
        run = ratios.get(name)
        if run is None or run["ratio_to_none"] is None:
            claims.append(Claim(statement, "-", "-", None))
            continue
        kept = run["ratio_to_none"]
        ideal = run["ideal_ratio_to_none"]
        holds = abs(kept - ideal) <= margin
        claims.append(Claim(statement, f"{ideal:.1%}, by arithmetic", f"{kept:.1%}", holds))
    return claims


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
        "node.",
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
        f"{run['ideal_ratio_to_none']:.1%}",
    )


def describe(claims: list[Claim], results: Results) -> str:
    """What was found, in two sentences."""
    parts = []
    if any(not result.runs for result in results.values()):
        parts.append("A measurement is missing.")
    parts += [
        f"{'Within' if claim.holds else 'Not within'} the bound: simulated over measured rates are "
        f"off by {claim.ours}."
        for claim in claims
        if claim.is_modelled and claim.holds is not None
    ]
    losses = [claim for claim in claims if not claim.is_modelled and claim.holds is not None]
    if losses:
        kept = ", ".join(claim.ours for claim in losses)
        parts.append(
            f"Beside one node that is 4 times slower there remain {kept} of the examples per "
            "second, in lockstep and where nobody waits by turns. The simulation leaves the "
            "processor time of a step out, so that it is faster than the measurement."
        )
    return " ".join(parts)


SECTION = Section(
    name="stragglers",
    title="Slow nodes: who waits for whom, measured and simulated",
    source="SGP-18, section 5.1 (asynchronous SGP is left to the future there)",
    write_text=lambda _: (
        "The papers argue that gossip waits for fewer nodes than AllReduce, and that asynchronous "
        "methods wait for none, without figures for slow nodes. Here 4 and 8 real processes train "
        "softmax regression, in lockstep or by nodes that wait for nobody; their computation is a "
        "sleep of 0.15 or 0.4 s times a factor: 2 or 4 at one node, or drawn for every step of "
        "every node. A simulation of events with the same factors is set beside them."
    ),
    list_runs=list_runs,
    find=find,
)
