"""The time of a step in which all nodes are equally fast. NumPy only."""

import dataclasses

import numpy as np

from gossipjax.cost_model._require import require_number_of_nodes
from gossipjax.cost_model.exchange import Exchange
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Means of a step.

    Attributes:
      seconds: of a step.
      compute_seconds: of its computation.
      exchange_seconds: in which the busiest node's link, or host, works for the exchange.
      exposed_seconds: of the exchange that the computation does not hide.
      sent_bytes: by the node that sends most.
      examples_per_second: of all nodes.
    """

    seconds: float
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    sent_bytes: float
    examples_per_second: float


def predict_step(method: Method, workload: Workload, network: Network, nodes: int) -> Prediction:
    """Mean seconds of a step, over a cycle of the schedule, where all nodes are equally fast.

    An exchange takes `e` seconds, of which the computation of `c` seconds hides a part:

        step = c + sum over exchanges of mean over their rounds (exposed(e)) / every

    See `Exchange.find_exposed_seconds`. A link cannot carry more than it can: a step is never
    shorter than the mean of all `e` in it. Asynchronous nodes that wait for nobody take `c`, and
    send as often as their link is free. A modelled figure: nothing is measured.

    Args:
      method: of `cost_model.methods`.
      workload: the computation of a node, and its model.
      network: the links.
      nodes: N, that of the method's schedules.

    Raises:
      ValueError: if an argument is of another type, or a schedule or fabric of another number of
        nodes.

    >>> import gossipjax as gx
    >>> from gossipjax.cost_model import Network, Workload, allreduce, predict_step, sgp
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2, examples=256)
    >>> network = Network(bandwidth=1e9)
    >>> predict_step(allreduce("ring"), workload, network, 8).seconds
    0.375
    >>> schedule = gx.topology.one_peer_exponential(8)
    >>> round(predict_step(sgp(schedule), workload, network, 8).seconds, 6)
    0.3
    """
    for value, kind in ((method, Method), (workload, Workload), (network, Network)):
        if not isinstance(value, kind):
            raise ValueError(
                f"predict_step must be given a {kind.__name__} of gossipjax.cost_model, got "
                f"{value!r}."
            )
    nodes = require_number_of_nodes(nodes)
    compute = workload.compute_seconds
    exchange_seconds = 0.0
    exposed_seconds = 0.0
    awaited_seconds = 0.0
    sent_bytes = 0.0
    for exchange in method.exchanges:
        steps = exchange.list_steps()
        seconds = np.array([_find_longest(exchange, k, workload, network, nodes) for k in steps])
        sent = np.array([exchange.count_sent_bytes(k, workload, network, nodes) for k in steps])
        if exchange.awaits == "nobody":
            is_free = np.minimum(1.0, compute / np.maximum(seconds, compute or 1.0))
            seconds = seconds * is_free
            sent = sent * is_free
        else:
            exposed = [exchange.find_exposed_seconds(float(e), compute) for e in seconds]
            exposed_seconds += sum(exposed) / len(exposed) / exchange.every
            awaited_seconds += float(seconds.mean()) / exchange.every
        exchange_seconds += float(seconds.mean()) / exchange.every
        sent_bytes += float(sent.mean()) / exchange.every
    step = max(compute + exposed_seconds, awaited_seconds)
    return Prediction(
        seconds=step,
        compute_seconds=compute,
        exchange_seconds=exchange_seconds,
        exposed_seconds=step - compute,
        sent_bytes=sent_bytes,
        examples_per_second=nodes * workload.examples / step if step else np.inf,
    )


def _find_longest(
    exchange: Exchange, step: int, workload: Workload, network: Network, nodes: int
) -> float:
    return float(exchange.find_seconds(step, workload, network, nodes).max())
