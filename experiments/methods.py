"""The algorithms, topologies, optimizers and learning rates that programs know by name."""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import optax

import gossipjax as gx

Algorithm = Literal["sgp", "dpsgd", "dpsgd-adapt-then-combine", "allreduce"]
Topology = Literal[
    "one_peer_exponential",
    "two_peer_exponential",
    "exponential",
    "bipartite_exponential",
    "ring",
    "directed_ring",
    "complete",
]
Optimizer = Literal["sgd", "nesterov", "adam"]
RateSchedule = Literal["constant", "cosine", "goyal"]

GOYAL_BATCH = 256  # examples that the reference rate is for
GOYAL_EPOCHS = 90
GOYAL_WARM_UP, GOYAL_DECAYS = 5, (30, 60, 80)


class Method(NamedTuple):
    """One algorithm on one topology, around an optimizer."""

    topology: str
    schedule: gx.Schedule
    inner: optax.GradientTransformationExtraArgs  # what comes before the gossip
    gossip: optax.GradientTransformationExtraArgs

    @property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """The whole chain; its state is the pair of its parts' states."""
        return optax.chain(self.inner, self.gossip)


def schedule(topology: Topology, nodes: int) -> gx.Schedule:
    """The named topology over `nodes` nodes.

    >>> schedule("two_peer_exponential", 8).period
    3
    """
    if topology == "two_peer_exponential":
        if nodes == 2:
            raise ValueError(
                "two_peer_exponential needs two peers: 1 node, or 3 and more; given 2."
            )
        return gx.topology.k_peer_exponential(nodes, 2)
    builders: dict[str, Callable[[int], gx.Schedule]] = {
        name: getattr(gx.topology, name) for name in get_args(Topology) if "two" not in name
    }
    return builders[topology](nodes)


def method(
    algorithm: Algorithm, topology: Topology, nodes: int, optimizer: optax.GradientTransformation
) -> Method:
    """The named algorithm on the named topology, around `optimizer`.

    AllReduce has no topology of its own: it is the complete graph whatever `topology` says.

    Raises:
      ValueError: for a topology that is impossible for so many nodes, or for this algorithm.

    >>> method("allreduce", "ring", 4, optax.sgd(0.1)).topology
    'complete'
    """
    if algorithm == "allreduce":
        averaged = optax.chain(gx.allreduce(), optimizer)
        nothing = optax.with_extra_args_support(optax.identity())
        return Method("complete", gx.topology.complete(nodes), averaged, nothing)
    graph = schedule(topology, nodes)
    gossip = {
        "sgp": lambda: gx.sgp(graph),
        "dpsgd": lambda: gx.dpsgd(graph, "combine-while-adapting"),
        "dpsgd-adapt-then-combine": lambda: gx.dpsgd(graph, "adapt-then-combine"),
    }[algorithm]()
    return Method(topology, graph, optax.with_extra_args_support(optimizer), gossip)


def learning_rate(name: RateSchedule, rate: float, steps: int, total_batch: int) -> optax.Schedule:
    """The learning rate over steps.

    `constant`: `rate`. `cosine`: from `rate` to 0 by half a cosine. Neither is scaled by the number
    of nodes. `goyal` (Goyal et al. 2017): `rate` is for 256 examples and is scaled linearly with
    `total_batch`, all nodes together; it warms up from `rate`, or what is less, over the first 5 of
    90 epochs and falls by 10 at epochs 30, 60 and 80, all stretched to `steps`.

    >>> goyal = learning_rate("goyal", 0.1, 900, 1024)
    >>> [round(float(goyal(10 * epoch)), 4) for epoch in (0, 5, 29, 30, 60, 80)]
    [0.1, 0.4, 0.4, 0.04, 0.004, 0.0004]
    """
    if name == "constant":
        return optax.constant_schedule(rate)
    if name == "cosine":
        return optax.cosine_decay_schedule(rate, steps)
    peak = rate * total_batch / GOYAL_BATCH
    warm_up = max(1, round(steps * GOYAL_WARM_UP / GOYAL_EPOCHS))
    decays = {round(steps * epoch / GOYAL_EPOCHS) - warm_up: 0.1 for epoch in GOYAL_DECAYS}
    return optax.join_schedules(
        [
            optax.linear_schedule(min(rate, peak), peak, warm_up),
            optax.piecewise_constant_schedule(peak, decays),
        ],
        [warm_up],
    )


def optimizer(
    name: Optimizer, rate: optax.ScalarOrSchedule, weight_decay: float
) -> optax.GradientTransformation:
    """SGD, SGD with Nesterov momentum 0.9, or Adam, with weight decay.

    For SGD the decay is added to the gradient (L2), for Adam it is decoupled (AdamW). It sees the
    parameters that the user holds: for SGP the de-biased ones.
    """
    if name == "adam":
        return optax.adamw(rate, weight_decay=weight_decay)
    momentum = 0.9 if name == "nesterov" else None
    return optax.chain(
        optax.add_decayed_weights(weight_decay),
        optax.sgd(rate, momentum=momentum, nesterov=name == "nesterov"),
    )
