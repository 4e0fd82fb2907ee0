"""Seconds per iteration of the network measurement, by the cost model. Modelled."""

import dataclasses
import math

from experiments.results import Record
from experiments.speed.modelled.methods import make_modelled_method
from experiments.speed.network.rows import BUCKETS, CENTRALIZED, Row
from gossipjax.cost_model import Method, Network, Workload, predict_step


def predict_row(
    row: Row,
    configuration: Record,
    computation_seconds: float,
    cpu_seconds: float,
    packing_seconds: float,
) -> float | None:
    """Seconds per iteration of a row; None of what the cost model does not have.

    Computation, goodput and processor time are measured in the same run; the cost model says how
    many messages go where, and what overlaps. All hosts share the cores of one machine. So the
    processor time of an exchange that runs beside the computation makes that longer, and the
    packing, which is that beyond plain streams, comes before the wire. Beside computation an
    exchange has the goodput of streams beside computation, and half of the cores for its packing.
    What is left of it when the computation has ended goes as fast as alone.

    Args:
      row: the algorithm and the form of its messages.
      configuration: an entry of `configurations` in `summary.json`.
      computation_seconds: of an iteration without exchange.
      cpu_seconds: for which the exchange takes all cores.
      packing_seconds: the part of it that plain streams of as many bytes do not need.
    """
    method = make_modelled_method(row)
    if method is None:
        return None
    hosts = configuration["hosts"]
    workload = Workload(
        configuration["parameters"],
        computation_seconds + (cpu_seconds if row.overlaps else 0.0),
        configuration["examples_per_host"],
    )
    # The parameter server has one busy link, all others have all at once.
    field = "goodput_one_link" if row.algorithm == CENTRALIZED else "goodput_all_links"
    network = Network(configuration[field], name=configuration["bandwidth"] or "loopback")
    copied = count_copied_bytes(method, workload, network, hosts)
    if copied and packing_seconds:
        network = dataclasses.replace(network, host_copy=copied / packing_seconds)
    alone = predict_step(method, workload, network, hosts)
    if not row.overlaps or row.algorithm == BUCKETS:  # which begin later, and end alone
        return alone.seconds
    goodput = configuration["goodput_busy_hosts"]
    busy = dataclasses.replace(network, bandwidth=goodput, host_copy=network.host_copy / 2)
    beside = predict_step(method, workload, busy, hosts)
    if not beside.exposed_seconds:
        return beside.seconds
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
