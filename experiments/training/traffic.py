"""The bytes that a run sends, counted by its method."""

import dataclasses

from experiments.training.forms import FORMS, WireName
from experiments.training.methods import Method
from gossipjax import cost_model
from gossipjax.cost_model import Exchange, Network, Workload

ANY_NETWORK = Network(1.0)  # bytes do not depend on it


def list_exchanges(method: Method, wire: WireName, nodes: int) -> list[Exchange]:
    """Returns what a method exchanges, by update; exact averages are on a ring."""
    exchanges: list[Exchange] = []
    if method.algorithm == "allreduce":
        exchanges += _make_average(wire, 1, nodes)
    # Without outer steps, as theirs come below; gossip in the place of their average is theirs.
    inner = dataclasses.replace(method, outer=None, outer_average="exact")
    state = inner.state()
    if state is not None:
        exchanges += cost_model.from_plan(state.plan, method.algorithm).exchanges
    outer = method.outer
    if outer is None or outer.outer_average == "none":
        return exchanges
    every = outer.outer_every or 1
    if outer.outer_average == "exact":
        return [*exchanges, *_make_average(outer.outer_wire, every, nodes)]
    codec = FORMS[outer.outer_wire].codec
    if outer.gossip is None:
        models = 1 if outer.outer_pull == 1 else 2
        gossip = cost_model.noloco(method.outer_average, every, codec, models)
        return [*exchanges, *gossip.exchanges]
    state = method.state()
    assert state is not None
    found = cost_model.from_plan(state.plan, outer.gossip).exchanges
    return [*exchanges, *(dataclasses.replace(e, every=e.every * every) for e in found)]


def _make_average(wire: WireName, every: int, nodes: int) -> tuple[Exchange, ...]:
    """An exact average; sparse messages go from each node to all others."""
    codec = FORMS[wire].codec
    if codec is not None and codec.is_sparse:
        return cost_model.sparse_loco(every, nodes, codec).exchanges
    return cost_model.diloco(every, wire=codec).exchanges


def count_sent_bytes(method: Method, wire: WireName, parameters: int, nodes: int) -> float:
    """Returns the bytes of a step, the mean over the steps, of the node that sends most.

    `wire` is that of the algorithm, `parameters` the number of those of a node's model.

    >>> import optax
    >>> from experiments.training.methods import MethodOptions, make_method
    >>> sgp = make_method("sgp", MethodOptions(nodes=4, local_steps=5), optax.sgd(0.1))
    >>> count_sent_bytes(sgp, "float32", 1000, nodes=4)
    800.0
    """
    exchanges = tuple(list_exchanges(method, wire, nodes))
    return cost_model.predict_step(
        cost_model.Method(method.algorithm, exchanges), Workload(parameters), ANY_NETWORK, nodes
    ).sent_bytes
