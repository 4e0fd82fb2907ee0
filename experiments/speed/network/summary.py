"""What the hosts of a network measurement have measured, as the objects of its files."""

import os
from collections.abc import Sequence

import numpy as np

from experiments.results import Record
from experiments.speed.harness import summarize_samples
from experiments.speed.modelled.network import predict_row
from experiments.speed.network.rows import (
    ALL_LINKS,
    BUSY_HOSTS,
    CENTRALIZED,
    COMPUTATION,
    SINGLE_LINK,
    Row,
    compute_limits,
    name_computation,
)
from experiments.training.asynchronous import ASYNCHRONOUS

GOODPUTS = {
    "goodput_all_links": ALL_LINKS,
    "goodput_one_link": SINGLE_LINK,
    "goodput_busy_hosts": BUSY_HOSTS,
}


def summarize_configuration(hosts: int, bandwidth: str | None, records: Sequence[Record]) -> Record:
    """The entry of `configurations` in `summary.json`.

    Args:
      hosts: number of hosts.
      bandwidth: of every link, as `tc` reads it; None without limits.
      records: what each host has measured.
    """
    first = records[0]
    stream_bytes = first["stream_bytes"]
    stream_cpu_seconds = sum_cpu_seconds(records, ALL_LINKS) / (os.cpu_count() or 1)
    goodputs = {
        field: stream_bytes / find_stream_seconds(records, name) for field, name in GOODPUTS.items()
    }
    return {
        "hosts": hosts,
        "bandwidth": bandwidth,
        "parameters": first["parameters"],
        "examples_per_host": first["examples"],
        **summarize_samples("computation_seconds", max_over_hosts(records, COMPUTATION)),
        "stream_bytes": stream_bytes,
        **goodputs,
        "stream_cpu_seconds_per_byte": stream_cpu_seconds / (hosts * stream_bytes),
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in records),
    }


def summarize_row(row: Row, configuration: Record, records: Sequence[Record]) -> Record:
    """The entry of `runs` in `summary.json` for one row.

    Args:
      row: the algorithm and the type of its messages.
      configuration: of `summarize_configuration`, of the same records.
      records: what each host has measured.
    """
    waits = row.algorithm not in ASYNCHRONOUS
    seconds = (max_over_hosts if waits else mean_over_hosts)(records, row.name)
    if row.period == 1:
        samples = seconds
        computation_seconds = configuration["computation_seconds"]
    else:  # hosts meet once in a period, and the last to come has taken longest for all of it
        samples = max_over_hosts(records, row.name, row.period)
        alone = [np.mean(record["seconds"][name_computation(row)]) for record in records]
        computation_seconds = float(max(alone))
    steps = range(len(seconds))
    parameters = configuration["parameters"]
    link_bytes = float(np.mean([row.count_link_bytes(step, parameters) for step in steps]))
    sent_bytes = np.array([row.count_sent_bytes(step, parameters) for step in steps])
    has_counter = configuration["bandwidth"] is not None
    has_rounds = has_counter and row.period == 1  # of a period, only the sum is counted
    nic_bytes = np.array([record["nic_bytes"][row.name] for record in records])  # [hosts, steps]
    # The faster kind of stream makes the stricter bound.
    goodput = max(configuration["goodput_all_links"], configuration["goodput_one_link"])
    limits = compute_limits(computation_seconds, link_bytes, goodput)
    limit_seconds = limits.max if row.overlaps else limits.sum
    timing = summarize_samples("seconds", samples)
    if not waits:  # as many fast steps as slow ones: only their mean is a rate
        timing["seconds"] = float(seconds.mean())
    cpu_seconds = compute_exchange_cpu_seconds(row, records)
    packing_seconds = compute_packing_seconds(row, configuration, cpu_seconds, link_bytes)
    modelled = predict_row(row, configuration, computation_seconds, cpu_seconds, packing_seconds)
    return {
        "algorithm": row.algorithm,
        "topology": row.method.topology,
        "wire": row.wire,
        "hosts": configuration["hosts"],
        "bandwidth": configuration["bandwidth"],
        "iterations": len(seconds),
        **timing,
        "seconds_by_round": median_by_round(row, seconds),
        "computation_seconds": computation_seconds,
        "sent_bytes": float(sent_bytes.mean()),
        "sent_bytes_by_round": median_by_round(row, sent_bytes),
        "nic_bytes": float(nic_bytes.mean(axis=1).max()) if has_counter else None,
        "nic_bytes_by_round": median_by_round(row, nic_bytes.max(axis=0)) if has_rounds else None,
        "exchange_cpu_seconds": cpu_seconds,
        "packing_seconds": packing_seconds,
        "link_bytes": link_bytes,
        "goodput": goodput,
        "overlaps": row.overlaps,
        "limit_sum_seconds": limits.sum,
        "limit_max_seconds": limits.max,
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

    Processor time of all hosts beyond that of iterations without exchange, over the cores that they
    share; 0 where noise makes that negative.
    """
    name = COMPUTATION if row.period == 1 else name_computation(row)
    extra = sum_cpu_seconds(records, row.name) - sum_cpu_seconds(records, name)
    return max(0.0, extra / (os.cpu_count() or 1))


def compute_packing_seconds(
    row: Row, configuration: Record, cpu_seconds: float, link_bytes: float
) -> float:
    """The part of an exchange's processor time that plain streams of as many bytes do not need.

    The streams' own processor time is in their goodput.

    Args:
      row: the algorithm and the form of its messages.
      configuration: of `summarize_configuration`.
      cpu_seconds: of `compute_exchange_cpu_seconds`.
      link_bytes: bytes that the busiest link carries one after another.
    """
    links = 1 if row.algorithm == CENTRALIZED else configuration["hosts"]  # that are busy
    return max(0.0, cpu_seconds - configuration["stream_cpu_seconds_per_byte"] * links * link_bytes)


def median_by_round(row: Row, values: np.ndarray) -> dict[str, float]:
    """Median value of the iterations that ran the same program, by its static step.

    Args:
      row: the algorithm, which knows its rounds.
      values: `[iterations]`, seconds or bytes.
    """
    rounds = np.array([row.canonical_step(step) for step in range(len(values))])
    return {f"{round_}": float(np.median(values[rounds == round_])) for round_ in np.unique(rounds)}


def max_over_hosts(records: Sequence[Record], name: str, period: int = 1) -> np.ndarray:
    """Seconds per step of the slowest host in each period of steps, `[iterations / period]`."""
    seconds = np.array([record["seconds"][name] for record in records])
    return seconds.reshape(len(records), -1, period).mean(axis=2).max(axis=0)


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
