"""Seconds per iteration over a real network stack, compared with a lower bound.

    python -m experiments.speed wire --hosts 4 --bandwidth 200mbit      (as root)
    python -m experiments.speed wire                                    (no limits, loopback)

docs/evidence/speed.md says what it does, and lists the files, columns and fields that it writes.
"""

import dataclasses
import itertools
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import results
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.harness import summarize_samples
from experiments.speed.wire import links
from experiments.speed.wire.harness import make_display, measure_on_hosts, require_memory
from experiments.speed.wire.report import report_rows
from experiments.speed.wire.rows import (
    CENTRALIZED,
    Computation,
    Row,
    WireOptions,
    build_rows,
)
from experiments.speed.wire.timed import ALL_LINKS, BUSY_HOSTS, COMPUTATION, SINGLE_LINK
from gossipjax.cost_model import Method, Network, Workload, predict_step

CORES = os.cpu_count() or 1


def measure_wire(options: WireOptions) -> None:
    """Seconds per iteration of every algorithm over a network, compared with a lower bound."""
    out = None
    with exit_on_error(lambda: out), links.exit_on_stop_signals():
        rows = {hosts: build_rows(options, hosts) for hosts in options.hosts}
        if options.bandwidth:
            links.require_tools()
        require_memory(max(options.hosts), options.megabytes, "lower --megabytes or --hosts")
        out = results.create_run_dir("speed-wire", options.out, options.overwrite)
        console = Console()
        console.print(f"{options.megabytes:g} MB of parameters. Results: {out}", soft_wrap=True)
        load = describe_load()
        console.print(f"load {load['load_average'][0]:.2f}, TCP {load['tcp_congestion_control']}")
        left_out = {f"{n} hosts": reasons for n, (_, reasons) in rows.items() if reasons}
        tables: list[Record] = []
        runs: list[Record] = []
        with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
            for bandwidth, hosts, kind in itertools.product(
                options.bandwidth or (None,), options.hosts, options.computation
            ):
                found: list[list[Record]] = []
                title = f"{hosts} hosts, {bandwidth or 'loopback'}, computation {kind}"
                measure_on_hosts(
                    "rows",
                    dataclasses.replace(options, computation=(kind,)),
                    hosts,
                    None if bandwidth is None else links.parse_rate(bandwidth),
                    1.0,
                    make_display(bar, options.iterations, title),
                    found.extend,
                )
                (records,) = found
                table = summarize_configuration(hosts, bandwidth, kind, records)
                tables.append(table)
                runs += [summarize_row(row, table, records) for row in rows[hosts][0]]
                for line in list_metrics(hosts, bandwidth, records):
                    file.write(json.dumps({"computation": kind} | line) + "\n")
                file.flush()
                results.write_summary(
                    out,
                    dataclasses.asdict(options),
                    {"kernel": platform.release(), "cores": CORES, **describe_load()},
                    runs,
                    configurations=tables,
                    left_out=left_out,
                )
        report_rows(tables, runs, left_out, console)


def describe_load() -> Record:
    """What else makes a network slow: other programs, and how TCP reacts to losses."""
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "load_average": os.getloadavg(),
        "tcp_congestion_control": control.read_text().strip() if control.exists() else None,
    }


def summarize_configuration(
    hosts: int, bandwidth: str | None, computation: Computation, records: Sequence[Record]
) -> Record:
    """The entry of `configurations` in `summary.json`, from what each host has measured."""
    first = records[0]
    stream_bytes = first["stream_bytes"]
    stream_cpu_seconds = sum_cpu_seconds(records, ALL_LINKS) / CORES
    return {
        "hosts": hosts,
        "bandwidth": bandwidth,
        "bits_per_second": None if bandwidth is None else links.parse_rate(bandwidth),
        "computation": computation,
        "parameters": first["parameters"],
        "examples_per_host": first["examples"],
        **summarize_samples("computation_seconds", max_over_hosts(records, COMPUTATION)),
        "stream_bytes": stream_bytes,
        **summarize_samples("stream_seconds", max_over_hosts(records, ALL_LINKS)),
        "goodput_all_links": stream_bytes / find_stream_seconds(records, ALL_LINKS),
        "goodput_one_link": stream_bytes / find_stream_seconds(records, SINGLE_LINK),
        "goodput_busy_hosts": stream_bytes / find_stream_seconds(records, BUSY_HOSTS),
        "stream_cpu_seconds_per_byte": stream_cpu_seconds / (hosts * stream_bytes),
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
    }


def summarize_row(row: Row, configuration: Record, records: Sequence[Record]) -> Record:
    """The entry of `runs` in `summary.json` for one row, from what each host has measured."""
    seconds = (max_over_hosts if row.waits else mean_over_hosts)(records, row.name)
    computation_seconds = configuration["computation_seconds"]
    steps = range(len(seconds))
    parameters = configuration["parameters"]
    link_bytes = float(np.mean([row.count_link_bytes(step, parameters) for step in steps]))
    sent_bytes = np.array([row.count_sent_bytes(step, parameters) for step in steps])
    has_counter = configuration["bandwidth"] is not None
    nic_bytes = np.array([record["nic_bytes"][row.name] for record in records])  # [hosts, steps]
    # The faster kind of stream makes the stricter bound.
    goodput = max(configuration["goodput_all_links"], configuration["goodput_one_link"])
    limit_sum = computation_seconds + link_bytes / goodput
    limit_max = max(computation_seconds, link_bytes / goodput)
    limit_seconds = limit_max if row.overlaps else limit_sum
    timing = summarize_samples("seconds", seconds)
    if not row.waits:  # as many fast steps as slow ones: only their mean is a rate
        timing["seconds"] = float(seconds.mean())
    cpu_seconds = compute_exchange_cpu_seconds(row, records)
    packing_seconds = compute_packing_seconds(row, configuration, cpu_seconds, link_bytes)
    modelled = predict_row(row, configuration, computation_seconds, cpu_seconds, packing_seconds)
    return {
        "algorithm": row.algorithm,
        "topology": row.topology,
        "wire": row.wire,
        "hosts": configuration["hosts"],
        "bandwidth": configuration["bandwidth"],
        "computation": configuration["computation"],
        "iterations": len(seconds),
        **timing,
        "computation_seconds": computation_seconds,
        "sent_bytes": float(sent_bytes.mean()),
        "nic_bytes": float(nic_bytes.mean(axis=1).max()) if has_counter else None,
        "exchange_cpu_seconds": cpu_seconds,
        "packing_seconds": packing_seconds,
        "link_bytes": link_bytes,
        "goodput": goodput,
        "overlaps": row.overlaps,
        "limit_sum_seconds": limit_sum,
        "limit_max_seconds": limit_max,
        "limit_seconds": limit_seconds,
        "ratio_to_limit": timing["seconds"] / limit_seconds,
        "modelled_seconds": modelled,
        "modelled_ratio": None if modelled is None else modelled / timing["seconds"],
    }


def find_stream_seconds(records: Sequence[Record], name: str) -> float:
    """Seconds of a plain stream, the median over the iterations of the mean over the hosts.

    The slowest of several streams would tell of the noise of TCP, not of the links.
    """
    is_single = name == SINGLE_LINK  # the other hosts do nothing
    return float(np.median((max_over_hosts if is_single else mean_over_hosts)(records, name)))


def sum_cpu_seconds(records: Sequence[Record], name: str) -> float:
    """Processor seconds of an iteration, summed over the hosts."""
    return sum(float(np.mean(record["cpu_seconds"][name])) for record in records)


def compute_exchange_cpu_seconds(row: Row, records: Sequence[Record]) -> float:
    """Seconds for which the exchange of an iteration takes all cores: packing, copies, the kernel.

    Processor time of all hosts, less that without exchange, over their cores.
    """
    extra = sum_cpu_seconds(records, row.name) - sum_cpu_seconds(records, COMPUTATION)
    return max(0.0, extra / CORES)


def compute_packing_seconds(
    row: Row, configuration: Record, cpu_seconds: float, link_bytes: float
) -> float:
    """The part of an exchange's processor time that plain streams of as many bytes do not need.

    The streams' own processor time is in their goodput.
    """
    links = 1 if row.algorithm == CENTRALIZED else configuration["hosts"]  # that are busy
    return max(0.0, cpu_seconds - configuration["stream_cpu_seconds_per_byte"] * links * link_bytes)


def max_over_hosts(records: Sequence[Record], name: str) -> np.ndarray:
    """Seconds of each iteration of the slowest host, `[iterations]`."""
    return np.max([record["seconds"][name] for record in records], axis=0)


def mean_over_hosts(records: Sequence[Record], name: str) -> np.ndarray:
    """Seconds of each iteration where no host waits for another, the mean, `[iterations]`."""
    return np.mean([record["seconds"][name] for record in records], axis=0)


def list_metrics(hosts: int, bandwidth: str | None, records: Sequence[Record]) -> list[Record]:
    """The lines of `metrics.jsonl`: one per iteration of a row, with a list over the hosts each."""
    return [
        {
            "hosts": hosts,
            "bandwidth": bandwidth,
            "row": name,
            "iteration": k,
            "seconds": [record["seconds"][name][k] for record in records],
            "nic_bytes": [record["nic_bytes"][name][k] for record in records],
        }
        for name, seconds in records[0]["seconds"].items()
        for k in range(len(seconds))
    ]


def predict_row(
    row: Row,
    configuration: Record,
    computation_seconds: float,
    cpu_seconds: float,
    packing_seconds: float,
) -> float | None:
    """Seconds per iteration of a row; None of sparse averages and hybrid topologies.

    Computation, goodput and processor time are measured in the same run; the cost model says how
    many messages go where, and what overlaps.
    """
    if row.gathers or not row.has_one_cycle:
        return None
    method = row.method
    hosts = configuration["hosts"]
    # All hosts share the cores of one machine: the processor time of an exchange that runs during
    # the computation makes the computation longer.
    workload = Workload(
        configuration["parameters"],
        computation_seconds + (cpu_seconds if row.overlaps else 0.0),
        configuration["examples_per_host"],
    )
    # The parameter server has one busy link, all others have all at once.
    field = "goodput_one_link" if row.algorithm == CENTRALIZED else "goodput_all_links"
    network = Network(configuration[field], name=configuration["bandwidth"] or "loopback")
    # Packing, which plain streams do not need, comes before the wire.
    copied = count_copied_bytes(method, workload, network, hosts)
    if copied and packing_seconds:
        network = dataclasses.replace(network, host_copy=copied / packing_seconds)
    alone = predict_step(method, workload, network, hosts)
    if not row.overlaps or row.is_in_buckets:  # whose messages begin later, and end alone
        return alone.seconds
    # During computation streams are slower, and half of the cores are left for the packing.
    goodput = configuration["goodput_busy_hosts"]
    busy = dataclasses.replace(network, bandwidth=goodput, host_copy=network.host_copy / 2)
    beside = predict_step(method, workload, busy, hosts)
    if not beside.exposed_seconds:
        return beside.seconds
    # What is left of it when the computation has ended goes as fast as alone.
    speedup = beside.exchange_seconds / alone.exchange_seconds
    return beside.compute_seconds + beside.exposed_seconds / speedup


def count_copied_bytes(method: Method, workload: Workload, network: Network, hosts: int) -> int:
    """Bytes per step that the cost model copies through the memory of the busiest host.

    They are the seconds that a copy of 1 byte/s adds to the exchange.
    """
    speeds = (1.0, math.inf)
    slow, direct = (
        predict_step(method, workload, dataclasses.replace(network, host_copy=speed), hosts)
        for speed in speeds
    )
    return round(slow.exchange_seconds - direct.exchange_seconds)
