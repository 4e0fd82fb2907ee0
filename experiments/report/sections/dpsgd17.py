"""DPSGD-17, Figure 2 (c, d): low bandwidth, measured and modelled, and high latency."""

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import (
    GAPS,
    Claim,
    Figure,
    Findings,
    Result,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from experiments.report.sections.curves import use_log_scale
from experiments.report.sections.times.rows import can_limit_links
from gossipjax import cost_model
from gossipjax.topology import ring

RUN = "dpsgd17-bandwidth"
NODES = 7  # GPUs of Figure 2 (a, b)
MEGABYTES = 1.08  # ResNet-20 has 0.27 million parameters
COMPUTE_SECONDS = 0.3
BANDWIDTHS = ("1gbit", "100mbit", "20mbit")
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
    """Seconds per iteration over bandwidths, and over latencies."""
    del scale
    result = results.get(RUN, Result(status="missing"))
    measured = read_seconds(result)
    modelled = {latency: predict(FAST_BANDWIDTH, latency) for latency in LATENCIES}
    claims = [*claim_bandwidth(measured), claim_latency(modelled)]
    bandwidths = [measured.get(bandwidth, {}) for bandwidth in (BANDWIDTHS[0], BANDWIDTHS[-1])]
    claims.append(claim_slowdown("From 1 Gbit/s to 20 Mbit/s", *bandwidths))
    ends = (min(modelled), max(modelled))
    where = f"From {1000 * ends[0]:g} to {1000 * ends[1]:g} ms of latency"
    latencies = [modelled[latency] for latency in ends]
    claims.append(claim_slowdown(where, *latencies)._replace(is_modelled=True))
    figure = Figure(
        "seconds",
        "Seconds per iteration over bandwidth (measured) and over latency (modelled).",
        partial(draw_seconds, measured, modelled),
    )
    return Findings(
        claims=claims,
        sentence=describe(measured, modelled),
        tables=[make_bandwidth_table(measured, result), make_latency_table(modelled)],
        figures=[figure],
    )


def read_seconds(result: Result) -> dict[str, dict[str, float]]:
    """Measured seconds per iteration, by bandwidth and algorithm."""
    measured: dict[str, dict[str, float]] = {}
    for run in result.runs:
        measured.setdefault(run["bandwidth"], {})[run["algorithm"]] = run["seconds"]
    return measured


def predict(bandwidth: float, latency: float) -> dict[str, float]:
    """Modelled seconds per iteration of the three algorithms.

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


def claim_bandwidth(measured: Mapping[str, Seconds]) -> list[Claim]:
    """What the paper says of high and of low bandwidth."""
    fast = measured.get(BANDWIDTHS[0], {})
    slow = measured.get(BANDWIDTHS[-1], {})
    similar = Claim(
        f"At 1 Gbit/s and low latency all three have similar speed: the slowest takes less than "
        f"{SIMILAR:g} times as long as the fastest.",
        "similar speed",
        "-",
        None,
    )
    faster = Claim(
        f"At 20 Mbit/s D-PSGD is at least {FASTER:g} times as fast as the parameter server, whose "
        f"busiest node sends and receives {NODES - 1} models, D-PSGD's 2.",
        "up to an order of magnitude",
        "-",
        None,
    )
    if len(fast) == len(ALGORITHMS):
        factor = max(fast.values()) / min(fast.values())
        similar = similar._replace(ours=f"{factor:.2f} times", holds=factor < SIMILAR)
    if len(slow) == len(ALGORITHMS):
        factor = slow[CENTRALIZED] / slow[DPSGD]
        faster = faster._replace(ours=f"{factor:.2f} times", holds=factor >= FASTER)
    return [similar, faster]


def claim_latency(modelled: Mapping[float, Seconds]) -> Claim:
    """What the paper says of high latency."""
    latency = max(modelled)
    factor = modelled[latency][ALL_REDUCE] / modelled[latency][DPSGD]
    return Claim(
        f"At a latency of {1000 * latency:g} ms D-PSGD is at least {FASTER:g} times as fast as "
        f"AllReduce, whose ring needs {2 * (NODES - 1)} messages one after another, D-PSGD 2.",
        "up to an order of magnitude",
        f"{factor:.2f} times",
        factor >= FASTER,
        is_modelled=True,
    )


def claim_slowdown(where: str, fast: Seconds, slow: Seconds) -> Claim:
    """What the paper says of the centralized versions as links get worse."""
    claim = Claim(
        f"{where} both centralized versions, AllReduce and the parameter server, take at least "
        f"{SLOWER:g} times as long.",
        "both slow down significantly",
        "-",
        None,
    )
    if len(fast) < len(ALGORITHMS) or len(slow) < len(ALGORITHMS):
        return claim
    factors = {name: slow[name] / fast[name] for name in ALGORITHMS}
    return claim._replace(
        ours=", ".join(f"{TITLES[name]} {factor:.2f} times" for name, factor in factors.items()),
        holds=min(factors[ALL_REDUCE], factors[CENTRALIZED]) >= SLOWER,
    )


def make_bandwidth_table(measured: Mapping[str, Seconds], result: Result) -> Table:
    """Measured and modelled seconds, a row per bandwidth."""
    rows = []
    bits = {"1gbit": 1e9, "100mbit": 1e8, "20mbit": 2e7}
    for bandwidth in BANDWIDTHS:
        modelled = predict(bits[bandwidth] / 8, 0.0)
        cells = [bandwidth]
        for name in ALGORITHMS:
            seconds = measured.get(bandwidth, {}).get(name)
            ours = GAPS[result.status] if seconds is None else f"{seconds:.3f}"
            cells.append(f"{ours} ({modelled[name]:.3f})")
        rows.append(tuple(cells))
    columns = ("bandwidth", *(f"{TITLES[name]} (s)" for name in ALGORITHMS))
    return Table(
        "Seconds per iteration over bandwidth: measured (modelled)",
        columns,
        tuple(rows),
        "Modelled from nominal figures: 0.3 s of computation, 1.08 MB, and the bandwidth of tc.",
    )


def make_latency_table(modelled: Mapping[float, Seconds]) -> Table:
    """Modelled seconds, a row per latency."""
    rows = [
        (f"{1000 * latency:g}", *(f"{seconds[name]:.3f}" for name in ALGORITHMS))
        for latency, seconds in modelled.items()
    ]
    columns = ("latency (ms)", *(f"{TITLES[name]} (s)" for name in ALGORITHMS))
    note = "Modelled at 1 Gbit/s: a message takes the latency and its bytes over the bandwidth."
    return Table("Seconds per iteration over latency, modelled", columns, tuple(rows), note)


def draw_seconds(
    measured: Mapping[str, Seconds],
    modelled: Mapping[float, Seconds],
    figure: MatplotlibFigure,
) -> None:
    """Draws seconds over bandwidth and over latency, side by side."""
    figure.set_size_inches(8.4, 3.8)
    left, right = figure.subplots(1, 2)
    shown = [bandwidth for bandwidth in BANDWIDTHS if bandwidth in measured]
    for name in ALGORITHMS:
        with_row = [bandwidth for bandwidth in shown if name in measured[bandwidth]]
        left.plot(with_row, [measured[bandwidth][name] for bandwidth in with_row], "o-")
        points = [seconds[name] for seconds in modelled.values()]
        milliseconds = [1000 * latency for latency in modelled]
        right.plot(milliseconds, points, "s--", label=TITLES[name])
    left.set(title="measured", xlabel="bandwidth of every link")
    left.set_ylabel("seconds per iteration")
    right.set(title="modelled, 1 Gbit/s", xlabel="latency (ms)", xscale="log")
    right.xaxis.set_major_formatter("{x:g}")
    right.set_ylabel("seconds per iteration")
    for axes in (left, right):
        use_log_scale(axes)
        axes.grid(alpha=0.3, which="both")
    right.legend()


def describe(measured: Mapping[str, Seconds], modelled: Mapping[float, Seconds]) -> str:
    """What was found, in a few sentences."""
    parts = []
    slow = measured.get(BANDWIDTHS[-1], {})
    if len(slow) == len(ALGORITHMS):
        parts.append(
            f"At 20 Mbit/s an iteration takes {slow[CENTRALIZED]:.2f} s with a parameter server, "
            f"{slow[ALL_REDUCE]:.2f} s with a ring all-reduce and {slow[DPSGD]:.2f} s with D-PSGD: "
            f"{slow[DPSGD] / slow[ALL_REDUCE]:.2f} times as long as with the all-reduce, which "
            f"sends {2 * (NODES - 1) / NODES:.2f} models per node and step, D-PSGD 2."
        )
    else:
        parts.append("Bandwidths were not measured: that needs the full grid, root, ip and tc.")
    latency = max(modelled)
    seconds = modelled[latency]
    parts.append(
        f"At {1000 * latency:g} ms of latency, in the model, D-PSGD takes {seconds[DPSGD]:.2f} s, "
        f"AllReduce {seconds[ALL_REDUCE]:.2f} s and the server {seconds[CENTRALIZED]:.2f} s; "
        "latency is not measured."
    )
    return " ".join(parts)


def write_text(scale: Scale) -> str:
    """What the paper did, and what is done at a scale."""
    if list_runs(scale):
        here = (
            f"Here {NODES} processes on links that tc limits train an MLP of as many bytes as "
            f"ResNet-20 ({MEGABYTES} MB), {COMPUTE_SECONDS} s of computation per iteration. "
            "Latency is modelled."
        )
    else:
        here = (
            f"Here bandwidth and latency are modelled, for {NODES} nodes, as many bytes as "
            f"ResNet-20 ({MEGABYTES} MB) and {COMPUTE_SECONDS} s of computation per iteration; "
            "measuring needs the full grid, root, ip and tc."
        )
    return (
        "The paper trains ResNet-20 on 7 GPUs, each a node, limits bandwidth and latency by tc, "
        "and compares a parameter server, AllReduce and D-PSGD on the ring; it has curves, no "
        f"table. {here}"
    )


SECTION = Section(
    name="dpsgd17",
    title="D-PSGD on networks of low bandwidth and high latency",
    source="DPSGD-17, Figure 2 (c, d)",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
