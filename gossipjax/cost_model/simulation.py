"""Simulates nodes that are not equally fast, step by step."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from gossipjax.cost_model.exchange import BACKWARD, Exchange, Workload
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.networks import Network
from gossipjax.cost_model.prediction import ROUNDING, find_share
from gossipjax.cost_model.slowness import Slowness

DEFAULT_STEPS = 60
MAX_CYCLE = 1000  # steps; longer cycles are not completed


class Links:
    """The links of all nodes. A link carries one message at a time each way, in the order asked."""

    def __init__(self, nodes: int):
        # From when on the link of each node is free, to send and to receive, in seconds.
        self._out_free = np.zeros(nodes)
        self._in_free = np.zeros(nodes)

    def send_round(
        self,
        slots: Sequence[np.ndarray],
        begun: np.ndarray,
        *,
        wire_seconds: float,
        copy_seconds: float,
        is_awaited: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sends the messages of a round; returns when each node has sent all, and received all.

        From the time `begun[j]` on, node `j` sends to `slots[0][j]`, then to `slots[1][j]`, and so
        on. With `is_awaited` receivers are at the same step, so messages wait for their links, too.
        """
        sent = begun.copy()
        received = np.full(len(begun), -math.inf)
        queue = [(time, node, 0) for node, time in enumerate(begun)]  # each node's next message
        heapq.heapify(queue)
        while queue:  # a receiver's link takes messages in the order in which they ask
            time, node, slot = heapq.heappop(queue)
            if slot == len(slots):
                continue
            target = slots[slot][node]
            if target != node:
                copied = max(time, self._out_free[node]) + copy_seconds
                time = max(copied, self._in_free[target] if is_awaited else 0.0) + wire_seconds
                self._out_free[node] = self._in_free[target] = sent[node] = time
                received[target] = max(received[target], time)
            heapq.heappush(queue, (time, node, slot + 1))
        return sent, received

    def reduce(
        self, exchange: Exchange, begun: np.ndarray, seconds: Sequence[np.ndarray], duration: float
    ) -> np.ndarray:
        """Occupies all links with an all-reduce; returns when each node has its result, `[N]`.

        It takes `duration` seconds. The nodes have computed at the times `begun`. `seconds` are the
        times of computation in this step, and in the one after the step that waits for the result.
        """
        # Of each part: the fraction of the backward pass that is left when its layer is done, which
        # also is the fraction of the next forward pass before it reaches the layer.
        remaining = exchange.list_layers() / exchange.layers if exchange.layers else np.zeros(1)
        ready = (begun - remaining[:, None] * BACKWARD * seconds[0]).max(axis=1)
        end = max(self._out_free.max(), self._in_free.max())
        for begin in ready:
            end = max(begin, end) + duration / len(ready)
        self._out_free[:] = end
        self._in_free[:] = end
        return np.maximum(begun.max(), end - remaining[-1] * (1 - BACKWARD) * seconds[1])


def _find_ends(
    method: Method, workload: Workload, network: Network, seconds: np.ndarray, steps: int
) -> np.ndarray:
    """Returns the times at which the nodes end their steps, in seconds, `[steps, N]`.

    Nodes wait for an exchange of `overlap = k` after k more computations. All messages of a step
    occupy their links before those of the next step. Computations take `seconds` `[T, N]`.
    """
    links = Links(seconds.shape[1])
    ends = np.zeros((steps + 1, seconds.shape[1]))
    # When an exchange has ended on each node, by its index and the step at which nodes wait for it.
    arrivals: dict[tuple[int, int], np.ndarray] = {}
    for step in range(steps):
        time = ends[step] + seconds[step % len(seconds)]
        for index, exchange in enumerate(method.exchanges):
            if not exchange.happens_at(step):
                continue
            # An all-reduce waits for the slowest of all nodes, a round of gossip for what it sends
            # and for what is sent to it, and AD-PSGD for its own link.
            if exchange.is_collective_at(step):
                computed = [seconds[k % len(seconds)] for k in (step, step + exchange.overlap + 1)]
                duration = exchange.find_seconds(step, workload, network, len(time)).max()
                done = links.reduce(exchange, time, computed, duration)
            else:
                size = exchange.count_bytes(workload, len(time))
                factor = 2 if exchange.is_half_duplex else 1  # a node sends, then receives
                is_awaited = exchange.awaits == "peers"
                done, received = links.send_round(
                    exchange.messages_at(step),
                    time,
                    wire_seconds=factor * network.message_seconds(size),
                    copy_seconds=factor * size / network.host_copy,
                    is_awaited=is_awaited,
                )
                if is_awaited:
                    done = np.maximum(done, received)
            if exchange.overlap:
                arrivals[index, step + exchange.overlap] = done
            else:
                time = np.maximum(time, done)
        for index in range(len(method.exchanges)):
            time = np.maximum(time, arrivals.pop((index, step), time))
        ends[step + 1] = time
    return ends[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulation:
    """What `simulate` returns: means over the simulated steps.

    Attributes:
      seconds: the seconds of a step: N divided by the steps per second of all nodes together.
      examples_per_second: the examples per second of all nodes together.
      staleness: the number of updates that a node makes while a message to it is on its way. For
        asynchronous nodes it is `ceil(s / c)`, if a message takes s seconds and a step takes c. For
        nodes in lockstep it is `Method.staleness`.
      kept: the fraction of tries to send at which an asynchronous node keeps its share because its
        link is busy, by the formula of `predict_step`; 0 for other nodes.

    >>> import gossipjax as gx
    >>> from gossipjax.cost_model import Network, Workload, from_transform
    >>> method = from_transform(gx.allreduce(), "allreduce")
    >>> found = simulate(method, Workload(1e6, 0.5, 8), Network(1e9), nodes=4, steps=20)
    >>> round(found.seconds, 3)
    0.506
    """

    seconds: float
    examples_per_second: float
    staleness: float
    kept: float


def simulate(
    method: Method,
    workload: Workload,
    network: Network,
    nodes: int,
    slowness: Slowness | np.ndarray | None = None,
    steps: int | None = None,
    seed: int = 0,
    warm_up: int | None = None,
) -> Simulation:
    """Simulates the steps of nodes that may be slow; nothing is measured.

    The computation of node i at its step t takes `f[t, i] c` seconds. Without slowness the result
    agrees with `predict_step`, with two exceptions that `predict_step` does not model: two messages
    that meet at one receiver (random peers), and an all-reduce that waits for messages on their way
    (SlowMo around OSGP).

    Args:
      method, workload, network, nodes: as in `predict_step`.
      slowness: the slowness from which the factors f are drawn, or f itself, `[T, N]`, repeated
        after T steps. By default no node is slow.
      steps: the number of steps of each node after `warm_up`; for asynchronous nodes, the mean. The
        default is 60 steps, rounded up to whole cycles.
      seed: the seed of the factors.
      warm_up: the number of steps at the start that the means leave out. The default is one cycle
        (at most 60 steps), plus the overlap of the exchanges.

    >>> import gossipjax as gx
    >>> from gossipjax.cost_model import Network, Slowness, Workload, from_transform, simulate
    >>> method = from_transform(gx.allreduce(), "allreduce")
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2)
    >>> slow = Slowness("constant", 4.0)
    >>> round(simulate(method, workload, Network(1e9), 8, slow).seconds, 6)
    0.975
    """
    for exchange in method.exchanges:
        exchange.require_nodes(nodes)
    cycle = min(MAX_CYCLE, math.lcm(*(exchange.cycle for exchange in method.exchanges)))
    if steps is None:
        steps = cycle * math.ceil(DEFAULT_STEPS / cycle)
    if warm_up is None:
        overlap = max((exchange.overlap for exchange in method.exchanges), default=0)
        warm_up = min(cycle, DEFAULT_STEPS) + overlap
    total = warm_up + steps
    factors = slowness
    if slowness is None or isinstance(slowness, Slowness):
        factors = (slowness or Slowness()).draw(nodes, total, seed)
    factors = np.asarray(factors, float)
    if factors.ndim != 2 or factors.shape[1] != nodes:
        raise ValueError(
            f"factors of slowness must be [T, N] with N = {nodes}, got shape {factors.shape}. "
            "Slowness.draw makes such."
        )
    if all(exchange.awaits == "nobody" for exchange in method.exchanges) and method.exchanges:
        # Messages delay no step, so the rates of the nodes add up.
        factors = factors[np.arange(warm_up, total) % len(factors)]
        rate = float((1 / (factors.mean(axis=0) * workload.compute_seconds)).sum())
        return _make_simulation(rate, method, workload, network, nodes)
    ends = _find_ends(method, workload, network, factors * workload.compute_seconds, total)
    seconds = ends[-1] - (ends[warm_up - 1] if warm_up else 0.0)
    rate = float((steps / seconds).sum()) if (seconds > 0).all() else math.inf
    return _make_simulation(rate, method, workload, network, nodes)


def _make_simulation(
    rate: float, method: Method, workload: Workload, network: Network, nodes: int
) -> Simulation:
    """Makes the result of `simulate` from `rate`, the steps per second of all nodes together."""
    step_seconds = nodes / rate
    staleness = float(method.staleness)
    kept = 0.0
    if method.is_asynchronous and step_seconds > 0:
        (exchange,) = method.exchanges
        steps = exchange.list_steps()
        seconds = np.array([exchange.find_seconds(k, workload, network, nodes) for k in steps])
        seconds = seconds.max(axis=1)  # of the slowest node in each round
        staleness = float(max(1, math.ceil(seconds.max() / step_seconds - ROUNDING)))
        if exchange.awaits == "nobody" and seconds.any():
            sent_share = find_share(seconds, step_seconds * exchange.every)
            kept = 1 - float(sent_share[seconds > 0].mean())
    return Simulation(
        seconds=step_seconds,
        examples_per_second=rate * workload.examples,
        staleness=staleness,
        kept=kept,
    )
