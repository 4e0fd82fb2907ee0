"""Time per iteration on throttled links, beside the cost model."""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.report.section import (
    GAPS,
    Claim,
    Findings,
    Result,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from experiments.report.sections.times.rows import (
    TimedRow,
    can_limit_links,
    claim_errors,
    list_rows,
    make_bars,
)
from experiments.results import Record

FAST = "times-1gbit"
SLOW = "times-200mbit"
LOOPBACK = "times-loopback"
BOUND = 0.1
FAST_ROWS = (
    "allreduce",
    "allreduce-buckets",
    "centralized",
    "dpsgd@ring",
    "dpsgd@bipartite_exponential",
    "sgp",
    "sgp@two_peer_exponential",
    "sgp-cwa",
    "1-osgp",
    "2-osgp",
    "async-sgp",
    "async-adpsgd",
)
SLOW_ROWS = ("allreduce", "dpsgd@ring", "sgp", "sgp-cwa", "1-osgp", "async-sgp")
QUICK_ROWS = ("allreduce", "sgp", "1-osgp")
TITLES = {FAST: "1 Gbit/s", SLOW: "200 Mbit/s", LOOPBACK: "the loopback, without limits"}
COLUMNS = (
    "link",
    "algorithm",
    "measured (s)",
    "10-90 % (s)",
    "modelled (s)",
    "modelled / measured",
    "computation (s)",
    "wire (s)",
    "processor time of the exchange (s)",
)


class Sizes(NamedTuple):
    """The sizes of a measurement.

    Attributes:
      hosts: processes.
      megabytes: of parameters.
      seconds: of an iteration without exchange.
      iterations: of every algorithm.
    """

    hosts: int = 4
    megabytes: int = 20
    seconds: float = 0.3
    iterations: int = 20


QUICK_SIZES = Sizes(2, 4, 0.05, 10)


def find_sizes(scale: Scale) -> Sizes:
    """The sizes at a scale."""
    return QUICK_SIZES if scale.is_quick else Sizes()


def list_runs(scale: Scale) -> list[Run]:
    """Two links of four hosts; without root, or when quick, the loopback."""
    sizes = find_sizes(scale)
    if scale.is_quick:
        return [make_run(LOOPBACK, (), QUICK_ROWS, sizes)]
    if not can_limit_links():
        return [make_run(LOOPBACK, (), FAST_ROWS, sizes)]
    return [
        make_run(FAST, ("--bandwidth", "1gbit"), FAST_ROWS, sizes),
        make_run(SLOW, ("--bandwidth", "200mbit"), SLOW_ROWS, sizes),
    ]


def make_run(name: str, links: tuple[str, ...], rows: tuple[str, ...], sizes: Sizes) -> Run:
    """A call of the network measurement."""
    hosts = ("--hosts", f"{sizes.hosts}", "--megabytes", f"{sizes.megabytes}")
    times = ("--compute-seconds", f"{sizes.seconds}", "--iterations", f"{sizes.iterations}")
    forms = ("--wire", "float32")
    arguments = ("network", *links, *hosts, *times, *forms, "--algorithm", *rows)
    return Run(name, "speed", arguments, is_alone=True)


def find(scale: Scale, results: Results) -> Findings:
    """Measured seconds beside those of the cost model; nothing is judged on the loopback."""
    del scale
    claims = []
    rows = []
    missed = []
    for name, result in results.items():
        timed = list_rows(result.runs, "bandwidth", "seconds", "modelled_seconds")
        rows += timed
        statement = (
            f"On {TITLES[name]} the cost model is within {BOUND:.0%} of every measured time per "
            "iteration."
        )
        claim = claim_errors(statement, "within 10 %: the aim of this project", timed, BOUND)
        claims.append(claim._replace(holds=None) if name == LOOPBACK else claim)
        missed += [row for row in timed if abs(row.error) > BOUND]
        if name != LOOPBACK:
            claims += claim_order(name, result)
    caption = "Seconds per iteration, measured and modelled, by the link of every host."
    figure = make_bars("seconds", caption, rows, "seconds per iteration", BOUND)
    return Findings(
        claims=claims,
        sentence=describe(claims, missed, results),
        tables=[make_table(results)],
        figures=[] if figure is None else [figure],
    )


def claim_order(name: str, result: Result) -> list[Claim]:
    """That gossip takes less time than AllReduce, and less still beside the computation."""
    seconds = {run["algorithm"]: run["seconds"] for run in result.runs}
    return [
        compare_seconds(
            f"At {TITLES[name]} an iteration of SGP takes less time than one of AllReduce.",
            "0.377 s against 0.704 s, 4 nodes at 10 Gbit/s (SGP-18, Table 2)",
            seconds,
            ("sgp", "allreduce"),
        ),
        compare_seconds(
            f"At {TITLES[name]} an iteration of 1-OSGP takes less time than one of SGP.",
            "1.8 h against 3.2 h, 16 nodes at 10 Gbit/s (SGP-19, Table 4)",
            seconds,
            ("1-osgp", "sgp"),
        ),
    ]


def compare_seconds(
    statement: str, paper: str, seconds: Mapping[str, float], names: tuple[str, str]
) -> Claim:
    """The claim that the first of two algorithms takes less time than the second."""
    if not all(name in seconds for name in names):
        return Claim(statement, paper, "-", None)
    less, more = (seconds[name] for name in names)
    return Claim(statement, paper, f"{less:.3f} s against {more:.3f} s", less < more)


def make_table(results: Results) -> Table:
    """A row per link and algorithm; runs that failed have one that says so."""
    rows = []
    for name, result in results.items():
        rows += [make_cells(TITLES[name], run) for run in result.runs]
        if not result.runs:
            rows.append((TITLES[name], "all", *[GAPS[result.status]] * (len(COLUMNS) - 2)))
    return Table(
        "Seconds per iteration",
        COLUMNS,
        tuple(rows),
        "Measured: median of the slowest host over the iterations; of asynchronous nodes, which "
        "wait for nobody, the mean of all. Modelled: from the computation, the goodput of plain "
        "TCP streams, alone and beside computation, and the processor time that were measured in "
        "the same run; the wire is that of the model's bytes at the goodput of streams alone. The "
        "processor time is an input, no prediction: all hosts share the cores of one machine.",
    )


def make_cells(link: str, run: Record) -> tuple[str, ...]:
    """A row of the table."""
    is_modelled = run["modelled_seconds"] is not None
    return (
        link,
        run["algorithm"],
        f"{run['seconds']:.3f}",
        f"{run['seconds_p10']:.2f}-{run['seconds_p90']:.2f}",
        f"{run['modelled_seconds']:.3f}" if is_modelled else "-",
        f"{run['modelled_ratio']:.3f}" if is_modelled else "-",
        f"{run['computation_seconds']:.3f}",
        f"{run['link_bytes'] / run['goodput']:.3f}",
        f"{run['exchange_cpu_seconds']:.3f}",
    )


def describe(claims: list[Claim], missed: list[TimedRow], results: Results) -> str:
    """What was found, in two sentences."""
    missing = [TITLES[name] for name, result in results.items() if not result.runs]
    parts = []
    if missing:
        parts.append(f"Without figures: {', '.join(missing)}.")
    if LOOPBACK in results:
        parts.append(
            "Links were not limited here, which needs root, ip and tc, and the full grid: on the "
            "loopback the exchange is processor time, nearly nothing is wire, and nothing is said "
            "about networks."
        )
        return " ".join(parts)
    errors = [claim.ours for claim in claims if claim.is_modelled and claim.holds is not None]
    if errors:
        parts.append(f"Modelled over measured seconds are off by {', and by '.join(errors)}.")
    if missed:
        names = ", ".join(f"{row.name} ({row.setting}, {100 * row.error:+.0f} %)" for row in missed)
        parts.append(
            f"Beyond the bound: {names}. The processes compute and send on the same few cores, "
            "where each slows the other; the model knows by how much in the mean only."
        )
    orders = [claim.holds for claim in claims if not claim.is_modelled]
    if orders and all(orders):
        parts.append("Gossip takes less time than AllReduce, and less still beside computation.")
    return " ".join(parts)


def write_text(scale: Scale) -> str:
    """What is measured, and what the model gets."""
    sizes = find_sizes(scale)
    where = (
        "each in a network namespace on a link that tc limits"
        if not scale.is_quick and can_limit_links()
        else "on the loopback, without limits"
    )
    return (
        "The paper times iterations of ResNet-50 on servers that Ethernet of 10 Gbit/s joins. Here "
        f"{sizes.hosts} processes, {where}, train an MLP of {sizes.megabytes} MB whose batch makes "
        f"an iteration without exchange take about {sizes.seconds:g} s. In each of "
        f"{sizes.iterations} rounds every algorithm makes an iteration, so that noise affects all "
        "alike. The cost model gets the computation, the goodput of plain TCP streams and the "
        "processor time of the exchange from the same run, and adds what each algorithm sends, to "
        "whom, and what overlaps."
    )


SECTION = Section(
    name="step-time",
    title="Time per iteration on throttled links, measured and modelled",
    source="SGP-18, Table 2; SGP-19, Table 4",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
