"""DPSGD-17, Figure 2 (c, d): low bandwidth, measured and modelled, and high latency."""

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.drawing import use_log_scale
from experiments.report.estimates import GAPS, Estimate, exact
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.report.sections.timing import can_limit_links
from experiments.runner import Result, Run
from gossipjax import cost_model
from gossipjax.topology import ring

RUN = "dpsgd17-bandwidth"
NODES = 7  # GPUs of Figure 2 (a, b)
MEGABYTES = 1.08  # ResNet-20 has 0.27 million parameters
COMPUTE_SECONDS = 0.3
BANDWIDTHS = {"1gbit": 1e9, "100mbit": 1e8, "20mbit": 2e7}  # bits per second
ALL_REDUCE = "allreduce"
CENTRALIZED = "centralized"
DPSGD = "dpsgd@ring"
ALGORITHMS = (ALL_REDUCE, CENTRALIZED, DPSGD)
TITLES = {ALL_REDUCE: "AllReduce", CENTRALIZED: "parameter server", DPSGD: "D-PSGD"}
SIMILAR = 1.5  # slowest over fastest
SLOWER = 2.0  # the least that "slow down significantly" means
FASTER = 3.0  # half of the n - 1 = 6 that the messages of the busiest node allow
LATENCIES = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25)  # seconds
FAST_BANDWIDTH = 125e6  # bytes/s, of the latencies: 1 Gbit/s

Seconds = Mapping[str, float]
"""Algorithm -> seconds per iteration."""


def list_runs(scale: Scale) -> list[Run]:
    """Seven hosts on links of three bandwidths; nothing without root, or when quick."""
    if scale.is_quick or not can_limit_links():
        return []
    sizes = ("--hosts", f"{NODES}", "--megabytes", f"{MEGABYTES}")
    times = ("--compute-seconds", f"{COMPUTE_SECONDS}", "--iterations", "10", "--wire", "float32")
    links = ("--bandwidth", *BANDWIDTHS)
    arguments = ("network", *sizes, *times, *links, "--algorithm", *ALGORITHMS)
    return [Run(RUN, "speed", arguments, is_alone=True)]


def find(scale: Scale, results: Results) -> Findings:
    """Compares seconds per iteration over bandwidths, and over latencies."""
    del scale
    result = results.get(RUN, Result(status="missing"))
    measured: dict[str, dict[str, float]] = {}
    for run in result.runs:
        measured.setdefault(run["bandwidth"], {})[run["algorithm"]] = run["seconds"]
    modelled = {latency: predict(FAST_BANDWIDTH, latency) for latency in LATENCIES}
    fast, slow = (measured.get(bandwidth, {}) for bandwidth in ("1gbit", "20mbit"))
    near, far = (modelled[latency] for latency in (LATENCIES[0], LATENCIES[-1]))
    spread = {}
    if len(fast) == len(ALGORITHMS):
        spread["slowest over fastest"] = exact(max(fast.values()) / min(fast.values()))
    claims = [
        Claim(
            "At 1 Gbit/s and low latency all three have similar speed: the slowest takes less than "
            f"{SIMILAR:g} times as long as the fastest.",
            "similar speed",
            spread,
            at_most=SIMILAR,
            spec=".2f",
        ),
        Claim(
            f"At 20 Mbit/s D-PSGD is at least {FASTER:g} times as fast as the parameter server, "
            f"whose busiest node sends and receives {NODES - 1} models, D-PSGD's 2.",
            "up to an order of magnitude",
            divide(slow, slow, {"times": (CENTRALIZED, DPSGD)}),
            at_least=FASTER,
            spec=".2f",
        ),
        Claim(
            f"At a latency of {1000 * max(LATENCIES):g} ms D-PSGD is at least {FASTER:g} times as "
            f"fast as AllReduce, whose ring needs {2 * (NODES - 1)} messages one after another, "
            "D-PSGD 2.",
            "up to an order of magnitude",
            divide(far, far, {"times": (ALL_REDUCE, DPSGD)}),
            at_least=FASTER,
            spec=".2f",
            is_modelled=True,
        ),
        judge_slowdown("From 1 Gbit/s to 20 Mbit/s", fast, slow),
        judge_slowdown(
            f"From {1000 * min(LATENCIES):g} to {1000 * max(LATENCIES):g} ms of latency", near, far
        )._replace(is_modelled=True),
    ]
    figure = Figure(
        "seconds",
        "Seconds per iteration over bandwidth (measured) and over latency (modelled).",
        partial(draw_seconds, measured, modelled),
    )
    tables = [tabulate_bandwidths(measured, result), tabulate_latencies(modelled)]
    return Findings(claims, tables, [figure])


def predict(bandwidth: float, latency: float) -> dict[str, float]:
    """Returns modelled seconds per iteration of the three algorithms.

    Args:
      bandwidth: bytes/s of every link.
      latency: seconds of every message.

    >>> seconds = predict(125e6, 0.1)
    >>> seconds["allreduce"] > seconds["dpsgd@ring"]
    True
    """
    network = cost_model.Network(bandwidth, latency)
    workload = cost_model.Workload(MEGABYTES * 1e6 / 4, COMPUTE_SECONDS)
    methods = {
        ALL_REDUCE: cost_model.allreduce(),
        CENTRALIZED: cost_model.centralized(),
        DPSGD: cost_model.dpsgd(ring(NODES)),
    }
    return {
        name: cost_model.predict_step(method, workload, network, NODES).seconds
        for name, method in methods.items()
    }


def divide(
    above: Seconds, below: Seconds, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Estimate]:
    """Returns ratios of seconds by their titles; none where an algorithm is missing."""
    if len(above) < len(ALGORITHMS) or len(below) < len(ALGORITHMS):
        return {}
    return {title: exact(above[first] / below[second]) for title, (first, second) in pairs.items()}


def judge_slowdown(where: str, fast: Seconds, slow: Seconds) -> Claim:
    """Returns the claim on the centralized versions as links get worse."""
    return Claim(
        f"{where} both centralized versions, AllReduce and the parameter server, take at least "
        f"{SLOWER:g} times as long.",
        "both slow down significantly",
        divide(slow, fast, {TITLES[name]: (name, name) for name in (ALL_REDUCE, CENTRALIZED)}),
        at_least=SLOWER,
        spec=".2f",
    )


def tabulate_bandwidths(measured: Mapping[str, Seconds], result: Result) -> Table:
    """Returns measured and modelled seconds, a row per bandwidth."""
    rows = []
    for bandwidth, bits in BANDWIDTHS.items():
        modelled = predict(bits / 8, 0.0)
        cells = [bandwidth]
        for name in ALGORITHMS:
            seconds = measured.get(bandwidth, {}).get(name)
            ours = GAPS[result.status] if seconds is None else f"{seconds:.3f}"
            cells.append(f"{ours} ({modelled[name]:.3f})")
        rows.append(cells)
    return Table(
        "Seconds per iteration over bandwidth: measured (modelled)",
        ("bandwidth", *(f"{TITLES[name]} (s)" for name in ALGORITHMS)),
        rows,
        "Modelled from nominal figures: 0.3 s of computation, 1.08 MB, and the bandwidth of tc.",
    )


def tabulate_latencies(modelled: Mapping[float, Seconds]) -> Table:
    """Returns modelled seconds, a row per latency."""
    rows = [
        (f"{1000 * latency:g}", *(f"{seconds[name]:.3f}" for name in ALGORITHMS))
        for latency, seconds in modelled.items()
    ]
    columns = ("latency (ms)", *(f"{TITLES[name]} (s)" for name in ALGORITHMS))
    note = "Modelled at 1 Gbit/s: a message takes the latency and its bytes over the bandwidth."
    return Table("Seconds per iteration over latency, modelled", columns, rows, note)


def draw_seconds(
    measured: Mapping[str, Seconds],
    modelled: Mapping[float, Seconds],
    figure: MatplotlibFigure,
) -> None:
    """Draws seconds over bandwidth and over latency, side by side."""
    figure.set_size_inches(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    for name in ALGORITHMS:
        shown = [bandwidth for bandwidth in BANDWIDTHS if name in measured.get(bandwidth, {})]
        left.plot(shown, [measured[bandwidth][name] for bandwidth in shown], "o-")
        points = [seconds[name] for seconds in modelled.values()]
        milliseconds = [1000 * latency for latency in modelled]
        right.plot(milliseconds, points, "s--", label=TITLES[name])
    left.set(title="measured", xlabel="bandwidth of every link")
    right.set(title="modelled, 1 Gbit/s", xlabel="latency (ms)", xscale="log")
    right.xaxis.set_major_formatter("{x:g}")
    for axes in (left, right):
        axes.set_ylabel("seconds per iteration")
        use_log_scale(axes)
        axes.grid(alpha=0.3, which="both")
    right.legend()


SECTION = Section(
    name="dpsgd17",
    title="D-PSGD on networks of low bandwidth and high latency",
    source="DPSGD-17, Figure 2 (c, d)",
    text="""
    The paper trains ResNet-20 on 7 GPUs, each a node, limits bandwidth and latency by tc, and
    compares a parameter server, AllReduce and D-PSGD on the ring; it has curves, no table. Here
    {nodes} processes on links that tc limits train an MLP of as many bytes as ResNet-20
    ({megabytes} MB), {seconds} s of computation per iteration. That needs the full grid, root, ip
    and tc; without them bandwidth is not judged. Latency is always modelled.
    """,
    find_numbers=lambda _: {
        "nodes": NODES,
        "megabytes": MEGABYTES,
        "seconds": COMPUTE_SECONDS,
    },
    list_runs=list_runs,
    find=find,
)
