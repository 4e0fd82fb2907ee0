"""The rows of nodes that wait for nobody: each host makes its steps as fast as it can."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import gossipjax as gx
from experiments.speed.network.loops.model import CalibratedModel, compute_gradients
from experiments.speed.network.rows import LEARNING_RATE
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import WireName

PATIENCE = 30.0  # seconds; the hosts share the cores
MAX_WAIT = 120.0  # seconds, until all hosts hear each other


class NodeSteps(NamedTuple):
    """What one host measured.

    Attributes:
      seconds: of each step.
      cpu_before: seconds that the threads of this process had computed before the first step.
      kept: steps at which it sent nothing, since its last message was still on its way.
      staleness: steps from sending a message to its acknowledgement, the mean.
    """

    seconds: list[float]
    cpu_before: float
    kept: int
    staleness: float


def join_job(
    model: CalibratedModel,
    algorithm: str,
    wire: WireName,
    listens: list[str],
    rank: int,
    secret: str,
) -> gx.asynchronous.Node:
    """Returns the node of this host, one of those at `listens`; it trains a copy of the model."""
    return gx.asynchronous.join(
        [address for place, address in enumerate(listens) if place != rank],
        optax.sgd(LEARNING_RATE),
        take_own(model.params),
        algorithm=ASYNCHRONOUS[algorithm].build(0),
        listen=listens[rank],
        place=rank,
        job=f"{algorithm} {wire}",
        is_founder=True,
        patience=PATIENCE,
        wire=None if wire == "float32" else wire,
        secret=secret,
    )


def run_steps(
    node: gx.asynchronous.Node, model: CalibratedModel, hosts: int, steps: int
) -> NodeSteps:
    """Makes steps, and waits for no other host, once all are there.

    Raises:
      TimeoutError: if they do not hear each other.
    """
    batch = take_own(model.batch)
    node.warm_up(compute_gradients, batch)
    if not node.wait_for_members(hosts, MAX_WAIT):
        raise TimeoutError(f"{hosts} hosts must hear each other within {MAX_WAIT:g} s, got fewer.")
    cpu_before = time.process_time()
    times = [time.perf_counter()]
    for _ in range(steps):
        node.step(compute_gradients, batch)
        times.append(time.perf_counter())
    statistics = node.statistics
    return NodeSteps(np.diff(times).tolist(), cpu_before, statistics.kept, statistics.staleness)


def take_own(stacked: Any) -> Any:
    """The row of this host's node, on its device."""
    return jax.tree.map(lambda x: x.addressable_data(0)[0], stacked)
