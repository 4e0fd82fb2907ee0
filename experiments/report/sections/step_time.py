"""Time per iteration on throttled links, beside the cost model."""

from typing import NamedTuple

from experiments.report.estimates import GAPS, exact
from experiments.report.section import Claim, Findings, Results, Scale, Section, Table
from experiments.report.sections.timing import can_limit_links, judge_errors, list_rows, make_bars
from experiments.results import Record
from experiments.runner import Result, Run

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
    """Processes, MB of parameters, seconds of an iteration without exchange, and iterations."""

    hosts: int = 4
    megabytes: int = 20
    seconds: float = 0.3
    iterations: int = 20


def find_sizes(scale: Scale) -> Sizes:
    """Returns the sizes at a scale."""
    return Sizes(2, 4, 0.05, 10) if scale.is_quick else Sizes()


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
    """Returns a call of the network measurement."""
    hosts = ("--hosts", f"{sizes.hosts}", "--megabytes", f"{sizes.megabytes}")
    times = ("--compute-seconds", f"{sizes.seconds}", "--iterations", f"{sizes.iterations}")
    forms = ("--wire", "float32")
    arguments = ("network", *links, *hosts, *times, *forms, "--algorithm", *rows)
    return Run(name, "speed", arguments, is_alone=True)


def find(scale: Scale, results: Results) -> Findings:
    """Compares measured seconds with those of the cost model; the loopback is not judged."""
    del scale
    claims = []
    rows = []
    for name, result in results.items():
        timed = list_rows(result.runs, "bandwidth", "seconds", "modelled_seconds")
        rows += timed
        claim = judge_errors(
            f"On {TITLES[name]} the cost model is within {BOUND:.0%} of every measured time per "
            "iteration.",
            "within 10 %: the aim of this project",
            timed,
            BOUND if name != LOOPBACK else float("inf"),
            if_not="The processes compute and send on the same few cores, where each slows the "
            "other; the model knows by how much in the mean only.",
        )
        claims.append(claim)
        if name != LOOPBACK:
            claims += judge_order(name, result)
    caption = "Seconds per iteration, measured and modelled, by the link of every host."
    figures = make_bars("seconds", caption, rows, "seconds per iteration", BOUND)
    return Findings(claims, [tabulate(results)], figures)


def judge_order(name: str, result: Result) -> list[Claim]:
    """Returns the claims that gossip takes less time than AllReduce, and overlap still less."""
    seconds = {run["algorithm"]: run["seconds"] for run in result.runs}
    claims = []
    for less, more, statement, paper in (
        (
            "sgp",
            "allreduce",
            "an iteration of SGP takes less time than one of AllReduce.",
            "0.377 s against 0.704 s, 4 nodes at 10 Gbit/s (SGP-18, Table 2)",
        ),
        (
            "1-osgp",
            "sgp",
            "an iteration of 1-OSGP takes less time than one of SGP.",
            "1.8 h against 3.2 h, 16 nodes at 10 Gbit/s (SGP-19, Table 4)",
        ),
    ):
        rows = {}
        if less in seconds and more in seconds:
            rows[f"{less} less {more}, s"] = exact(seconds[less] - seconds[more])
        statement = f"At {TITLES[name]} {statement}"
        claims.append(Claim(statement, paper, rows, at_most=0.0, spec="+.3f"))
    return claims


def tabulate(results: Results) -> Table:
    """Returns a row per link and algorithm; runs that failed have one that says so."""
    rows = []
    for name, result in results.items():
        rows += [list_cells(TITLES[name], run) for run in result.runs]
        if not result.runs:
            rows.append((TITLES[name], "all", *[GAPS[result.status]] * (len(COLUMNS) - 2)))
    return Table(
        "Seconds per iteration",
        COLUMNS,
        rows,
        "Measured: median of the slowest host over the iterations; of asynchronous nodes the mean "
        "of all. Modelled: from the computation, the goodput of plain TCP streams, alone and "
        "beside computation, and the processor time that were measured in the same run; the wire "
        "is that of the model's bytes at the goodput of streams alone. The processor time is an "
        "input, no prediction: all hosts share the cores of one machine.",
    )


def list_cells(link: str, run: Record) -> tuple[str, ...]:
    """Returns a row of the table."""
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


SECTION = Section(
    name="step-time",
    title="Time per iteration on throttled links, measured and modelled",
    source="SGP-18, Table 2; SGP-19, Table 4",
    text="""
    The paper times iterations of ResNet-50 on servers that Ethernet of 10 Gbit/s joins. Here
    {hosts} processes train an MLP of {megabytes} MB whose batch makes an iteration without exchange
    take about {seconds:g} s. Each is in a network namespace on a link that tc limits; that needs
    the full grid, root, ip and tc. Without them they are on the loopback, where nothing is said
    about networks. In each of {iterations} rounds every algorithm makes an iteration, so that noise
    affects all alike. The cost model gets the computation, the goodput of plain TCP streams and the
    processor time of the exchange from the same run, and adds what each algorithm sends, to whom,
    and what overlaps.
    """,
    find_numbers=lambda scale: find_sizes(scale)._asdict(),
    list_runs=list_runs,
    find=find,
)
