"""Measured and modelled times: throttled links, slow nodes, and DPSGD-17's Figure 2."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gossipjax as gx
from experiments.report.section import (
    GAPS,
    Claim,
    Estimate,
    Findings,
    Results,
    Scale,
    exact,
    read_claims,
    read_section,
    read_table,
    tabulate,
)
from experiments.results import Record
from experiments.runner import Result, Run
from experiments.speed.wire import links
from gossipjax import cost_model

ALL_REDUCE = "allreduce"


def can_limit_links() -> bool:
    """Whether links of a bandwidth can be made here: that needs Linux, root, ip and tc."""
    try:
        links.require_tools()
    except (ValueError, AttributeError):  # Windows knows no users by number
        return False
    return True


def find_gap(results: Results) -> str:
    """Returns what a table shows instead of figures, if no run has finished."""
    return next((GAPS[result.status] for result in results.values()), "-")


def find_errors(runs: Iterable[Record], names: Iterable[str], field: str) -> dict[str, Estimate]:
    """Returns by how much the modelled figures differ from the measured ones, as a part of these.

    `names` are of the settings of the runs, and `field` is what was measured.
    """
    return {
        f"{name} {run['algorithm']}": exact(round(modelled / run[field] - 1, 12))
        for name, run in zip(names, runs, strict=True)
        if (modelled := run[f"modelled_{field}"]) is not None
    }


# Time per iteration on throttled links

FAST = "times-1gbit"
SLOW = "times-200mbit"
LOOPBACK = "times-loopback"
STEP_BOUND = 0.1
FAST_ROWS = (
    *(ALL_REDUCE, "centralized", "dpsgd@ring", "dpsgd@bipartite_exponential"),
    *("sgp", "sgp@two_peer_exponential", "sgp-cwa", "1-osgp", "2-osgp", "async-sgp"),
    "async-adpsgd",
)
SLOW_ROWS = (ALL_REDUCE, "dpsgd@ring", "sgp", "sgp-cwa", "1-osgp", "async-sgp")
LINKS = {FAST: "1 Gbit/s", SLOW: "200 Mbit/s", LOOPBACK: "the loopback, without limits"}


def make_network_run(name: str, rows: Iterable[str], options: str) -> Run:
    """Returns a call of the measurement of links."""
    arguments = ("wire", *options.split(), "--wire", "float32", "--algorithm", *rows)
    arguments += ("--computation", "computed")
    return Run(name, "speed", arguments, is_alone=True)


def list_step_runs(scale: Scale) -> list[Run]:
    """Two links of four hosts; without root, or when quick, the loopback."""
    if scale.is_quick:
        sizes = "--hosts 2 --megabytes 4 --compute-seconds 0.05 --iterations 10"
        return [make_network_run(LOOPBACK, (ALL_REDUCE, "sgp", "1-osgp"), sizes)]
    sizes = "--hosts 4 --megabytes 20 --compute-seconds 0.3 --iterations 20"
    if not can_limit_links():
        return [make_network_run(LOOPBACK, FAST_ROWS, sizes)]
    return [
        make_network_run(FAST, FAST_ROWS, f"--bandwidth 1gbit {sizes}"),
        make_network_run(SLOW, SLOW_ROWS, f"--bandwidth 200mbit {sizes}"),
    ]


def find_step_times(scale: Scale, results: Results) -> Findings:
    """Compares measured seconds with those of the cost model; the loopback is not judged."""
    del scale
    claims = []
    records = []
    for name, result in results.items():
        runs = result.runs
        records += [
            run | {"link": LINKS[name], "wire_seconds": run["link_bytes"] / run["goodput"]}
            for run in runs
        ]
        settings = [run["bandwidth"] or "loopback" for run in runs]
        figures: dict[str, Any] = {run["algorithm"]: exact(run["seconds"]) for run in runs}
        figures["errors"] = find_errors(runs, settings, "seconds")
        is_limited = name != LOOPBACK
        aim = f"within {STEP_BOUND:.0%}: the aim of this project" if is_limited else "not judged"
        bound = STEP_BOUND if is_limited else math.inf
        numbers = {"link": LINKS[name], "bound": bound, "aim": aim}
        claims += read_claims("step-time", figures, numbers, "links")
        if is_limited:
            claims += read_claims("step-time", figures, numbers, "orders")
    return Findings(claims, [tabulate("step-time", records, find_gap(results))])


STEP_SECTION = read_section(
    name="step-time",
    list_runs=list_step_runs,
    find=find_step_times,
)

# Slow nodes

LOCKSTEP = ALL_REDUCE
ASYNCHRONOUS = "async-sgp"
GOSSIP = {"sgp": "SGP", "1-osgp": "1-OSGP"}  # in lockstep with the peers only
SLOWNESS = ("none", "2x", "4x", "random", "lognormal")
LOSSES = {
    LOCKSTEP: "all nodes wait for it: AllReduce keeps 1/4 of its examples per second",
    ASYNCHRONOUS: "nobody waits: asynchronous SGP keeps (N - 1 + 1/4) / N of its examples per "
    "second",
}


def list_straggler_runs(scale: Scale) -> list[Run]:
    """Four nodes with all kinds of slowness, and eight with three; when quick, two nodes."""
    calls = {
        4: f"--steps 20 --compute-seconds 0.15 --slowness {' '.join(SLOWNESS)} "
        f"--algorithm {LOCKSTEP} {' '.join(GOSSIP)} {ASYNCHRONOUS} async-adpsgd",
        8: f"--steps 15 --compute-seconds 0.4 --slowness none 4x random --algorithm {LOCKSTEP} "
        f"{' '.join(GOSSIP)} {ASYNCHRONOUS}",
    }
    if scale.is_quick:
        calls = {
            2: "--steps 10 --compute-seconds 0.1 --slowness none 4x "
            f"--algorithm {LOCKSTEP} {ASYNCHRONOUS}"
        }
    return [
        Run(
            f"stragglers-{nodes}",
            "speed",
            ("stragglers", "--nodes", f"{nodes}", *options.split()),
            is_alone=True,
        )
        for nodes, options in calls.items()
    ]


def find_stragglers(scale: Scale, results: Results) -> Findings:
    """Compares measured examples per second with those of the simulation."""
    bound = 0.5 if scale.is_quick else 0.15  # quick: processes that start beside others
    margin = 0.15 if scale.is_quick else 0.05  # of the examples per second that remain
    claims = []
    records = []
    for result in results.values():
        runs = sorted(result.runs, key=lambda run: SLOWNESS.index(run["slowness"]))
        records += [  # what waits for peers is neither all in lockstep nor all alone
            run | {"ideal_ratio_to_none": None} if run["algorithm"] in GOSSIP else run
            for run in runs
        ]
        if not runs:
            continue
        claims += judge_stragglers(runs, {"bound": bound, "margin": margin})
    if not claims:
        claims = read_claims("stragglers", {"errors": {}}, {"nodes": "some", "bound": bound})
    return Findings(claims, [tabulate("stragglers", records, find_gap(results))])


def judge_stragglers(runs: Sequence[Record], numbers: Record) -> list[Claim]:
    """Returns the claims on the simulation, on one slow node, and on nodes that are slow at random.

    Where one node is always the slow one, all wait for it in the end, through their peers.
    """
    nodes = runs[0]["nodes"]
    numbers = numbers | {"nodes": nodes, "points": 100 * numbers["margin"]}
    settings = [f"{nodes} nodes, slowness: {run['slowness']}" for run in runs]
    errors = find_errors(runs, settings, "examples_per_second")
    claims = read_claims("stragglers", {"errors": errors}, numbers)
    by_slowness: dict[str, dict[str, Record]] = {}
    for run in runs:
        if run["ratio_to_none"] is not None:
            by_slowness.setdefault(run["slowness"], {})[run["algorithm"]] = run
    for name, text in LOSSES.items():
        if run := by_slowness.get("4x", {}).get(name):
            found = {"text": text, "ideal": run["ideal_ratio_to_none"]}
            kept = {"kept": exact(run["ratio_to_none"])}
            claims += read_claims("stragglers", kept, numbers | found, "losses")
    at_random = by_slowness.get("random", {})
    for name, title in GOSSIP.items():
        if name in at_random and LOCKSTEP in at_random:
            run = at_random[name]
            lockstep = at_random[LOCKSTEP]
            ratios = {"kept": run["ratio_to_none"], ALL_REDUCE: lockstep["ratio_to_none"]}
            faster = run["examples_per_second"] / lockstep["examples_per_second"] - 1
            found = {"title": title, "faster": faster, **ratios}
            figures = {field: exact(ratio) for field, ratio in ratios.items()}
            claims += read_claims("stragglers", figures, numbers | found, "peers")
    return claims


STRAGGLER_SECTION = read_section(
    name="stragglers",
    list_runs=list_straggler_runs,
    find=find_stragglers,
)

# DPSGD-17, Figure 2 (c, d)

BANDWIDTH_RUN = "dpsgd17-bandwidth"
NODES = 7  # GPUs of Figure 2 (a, b)
MEGABYTES = 1.08  # ResNet-20 has 0.27 million parameters
COMPUTE_SECONDS = 0.3
BANDWIDTHS = {"1gbit": 1e9, "100mbit": 1e8, "20mbit": 2e7}  # bits per second
LATENCIES = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.25)  # seconds, at 1 Gbit/s
SERVER = "centralized"
DPSGD = "dpsgd@ring"
TITLES = {ALL_REDUCE: "AllReduce", SERVER: "parameter server", DPSGD: "D-PSGD"}

Seconds = Mapping[str, float]
"""Algorithm -> seconds per iteration."""


def list_bandwidth_runs(scale: Scale) -> list[Run]:
    """Seven hosts on links of three bandwidths; nothing without root, or when quick."""
    if scale.is_quick or not can_limit_links():
        return []
    options = f"""--bandwidth {" ".join(BANDWIDTHS)} --hosts {NODES} --megabytes {MEGABYTES}
    --compute-seconds {COMPUTE_SECONDS} --iterations 10"""
    return [make_network_run(BANDWIDTH_RUN, TITLES, options)]


def find_bandwidths(scale: Scale, results: Results) -> Findings:
    """Compares seconds per iteration over bandwidths, and over latencies."""
    del scale
    result = results.get(BANDWIDTH_RUN, Result(status="missing"))
    measured: dict[str, dict[str, float]] = {bandwidth: {} for bandwidth in BANDWIDTHS}
    for run in result.runs:
        measured[run["bandwidth"]][run["algorithm"]] = run["seconds"]
    modelled = {latency: predict(BANDWIDTHS["1gbit"] / 8, latency) for latency in LATENCIES}
    fast, slow = (measured[bandwidth] for bandwidth in ("1gbit", "20mbit"))
    near, far = (modelled[latency] for latency in (LATENCIES[0], LATENCIES[-1]))
    spread = {}
    if len(fast) == len(TITLES):
        spread["slowest over fastest"] = exact(max(fast.values()) / min(fast.values()))
    both = {TITLES[name]: (name, name) for name in (ALL_REDUCE, SERVER)}
    figures = {
        "spread": spread,
        "at 20 Mbit/s": divide(slow, slow, {"times": (SERVER, DPSGD)}),
        "at 250 ms": divide(far, far, {"times": (ALL_REDUCE, DPSGD)}),
        "to 20 Mbit/s": divide(slow, fast, both),
        "to 250 ms": divide(far, near, both),
    }
    rows = []
    for bandwidth, seconds in measured.items():
        cells = [bandwidth]
        for name, modelled_seconds in predict(BANDWIDTHS[bandwidth] / 8, 0.0).items():
            text = f"{seconds[name]:.3f}" if name in seconds else GAPS[result.status]
            cells.append(f"{text} ({modelled_seconds:.3f})")
        rows.append(cells)
    return Findings(read_claims("dpsgd17", figures), [read_table("dpsgd17", rows)])


def predict(bandwidth: float, latency: float) -> dict[str, float]:
    """Returns modelled seconds per iteration with links of bytes/s, and seconds per message."""
    network = cost_model.Network(bandwidth, latency)
    workload = cost_model.Workload(MEGABYTES * 1e6 / 4, COMPUTE_SECONDS)
    methods = {
        ALL_REDUCE: cost_model.from_transform(gx.allreduce(), ALL_REDUCE),
        SERVER: cost_model.from_transform(gx.allreduce(), SERVER, "server"),
        DPSGD: cost_model.from_transform(gx.dpsgd(gx.topology.ring(NODES)), DPSGD),
    }
    return {
        name: cost_model.predict_step(method, workload, network, NODES).seconds
        for name, method in methods.items()
    }


def divide(
    above: Seconds, below: Seconds, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Estimate]:
    """Returns ratios of seconds by their titles; none where an algorithm is missing."""
    if len(above) < len(TITLES) or len(below) < len(TITLES):
        return {}
    return {title: exact(above[first] / below[second]) for title, (first, second) in pairs.items()}


DPSGD17_SECTION = read_section(
    name="dpsgd17",
    list_runs=list_bandwidth_runs,
    find=find_bandwidths,
)
