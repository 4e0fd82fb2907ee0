"""Predicts the time of a step if all nodes are equally fast."""

import dataclasses

import numpy as np

from gossipjax.cost_model.exchange import Workload
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.networks import Network

ROUNDING = 1e-9  # tolerance for a ratio of times that differ by rounding only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What `predict_step` returns: means over the steps of a cycle.

    Attributes:
      seconds: the seconds of a step.
      compute_seconds: the seconds of the computation.
      exchange_seconds: the seconds in which the busiest node's link, or host, works for the
        exchange.
      exposed_seconds: the seconds of the exchange that the computation does not hide.
      sent_bytes: the bytes that the busiest node sends.
      examples_per_second: the examples per second of all nodes together.

    >>> import gossipjax as gx
    >>> from gossipjax.cost_model import Network, Workload, from_transform
    >>> method = from_transform(gx.allreduce(), "allreduce")
    >>> step = predict_step(method, Workload(25.6e6, 0.228, 256), Network(1.25e9), nodes=8)
    >>> (round(step.seconds, 3), round(step.exposed_seconds, 3))
    (0.371, 0.143)
    """

    seconds: float
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    sent_bytes: float
    examples_per_second: float


def predict_step(method: Method, workload: Workload, network: Network, nodes: int) -> Prediction:
    """Predicts the mean seconds of a step over a cycle of the schedule; nothing is measured.

    All nodes are equally fast. An exchange takes `e` seconds, of which the computation of `c`
    seconds hides a part:

        step = c + sum over exchanges of mean over their rounds (exposed(e)) / every

    `Exchange.find_exposed_seconds` is the function `exposed`. A step is never shorter than the mean
    of all `e` in it, which is the time that its messages occupy a link. A step of asynchronous
    nodes takes `c`. An asynchronous node tries to send every `g` seconds, the mean time between
    the rounds that send something. A message occupies the node's link for `e` seconds, so the link
    is free at one in `ceil(e / g)` tries.

    Raises:
      ValueError: if a schedule is for another number of nodes.

    >>> import gossipjax as gx
    >>> from gossipjax.cost_model import Network, Workload, from_transform, predict_step
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2, examples=256)
    >>> method = from_transform(gx.allreduce(), "allreduce", kind="ring")
    >>> predict_step(method, workload, Network(bandwidth=1e9), 8).seconds
    0.375
    """
    compute = workload.compute_seconds
    exchange_seconds = 0.0
    exposed_seconds = 0.0
    awaited_seconds = 0.0
    sent_bytes = 0.0
    for exchange in method.exchanges:
        steps = exchange.list_steps()
        seconds = np.array(
            [exchange.find_seconds(k, workload, network, nodes).max() for k in steps]
        )
        sent = np.array([exchange.count_sent_bytes(k, workload, nodes) for k in steps])
        if exchange.awaits == "nobody":  # nodes send only if their link is free
            sent_share = find_share(seconds, compute * exchange.every)
            seconds = seconds * sent_share
            sent = sent * sent_share
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


def find_share(seconds: np.ndarray, round_seconds: float) -> np.ndarray:
    """Returns for each round the fraction of its messages that are sent, if no node waits; `[T]`.

    A message whose link is busy is not sent. `seconds` `[T]` are the times `e` for which messages
    of each round occupy a link; a round begins every `round_seconds`. A node tries to send every
    `g` seconds, the mean between rounds that send something: one in `ceil(e / g)` tries succeeds.
    """
    gap = round_seconds * len(seconds) / max(1, np.count_nonzero(seconds))
    if gap == 0:  # without computation there are infinitely many tries
        return np.where(seconds > 0, 0.0, 1.0)
    return 1 / np.maximum(1.0, np.ceil(seconds / gap - ROUNDING))
